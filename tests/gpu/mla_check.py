"""Latent attention on this GPU: its ops against their references, a layer, and times.

    PYTHONPATH=src python tests/gpu/mla_check.py [ops] [layer] [times]

ops: the small cases of the op tests in bf16 and fp16, and DeepSeek's shapes.
layer: decodes captured in a CUDA graph follow sequences as they grow; a chunk behind a long cached
text, brought up in pieces, is attention over all of it, and the host waits for nothing.
times: decodes inside a CUDA graph beside the time to read their latents once (an H200 reads
4.52 TB/s), prompts in TFLOP/s.
"""

import itertools
import sys
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("ops", "fixtures")]

from op_cases import (  # noqa: E402
    OP_CASES,
    AttentionCase,
    OpCase,
    make_attention,
    mla_attend_case,
    mla_decode_case,
)

from penstock.kernels.attention.mla import (  # noqa: E402
    cached,
    mla_attend,
    mla_decode,
    plan_prefill,
    prefill,
)

DEVICE = torch.device("cuda")
READ_TBPS = 4.52
LATENT, ROPE, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 32
SCALE = (NOPE + ROPE) ** -0.5
FAILED: list[str] = []


def expect(ok: bool, what: str) -> None:
    print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        FAILED.append(what)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest one over the root mean square."""
    ours, theirs = ours.float(), theirs.float()
    found = (ours - theirs).abs().max() / theirs.square().mean().sqrt()
    return found.nan_to_num(torch.inf).item()


def check_ops() -> None:
    cases = [case for case in OP_CASES if case.op.__name__.startswith("mla")]
    for heads, fp8 in itertools.product((16, 32, 128), (False, True)):
        lens = (1, 31, 32, 33, 700, 5000)
        cases.append(mla_decode_case(*lens, heads=heads, latent=512, rotary=64, fp8=fp8))
    sizes, entries = (NOPE, ROPE, VALUE), ((300, 300), (1, 1), (129, 129))
    cases.append(mla_attend_case(entries, 16, sizes, causal=True))
    cases.append(mla_attend_case(((300, 2000), (1, 77), (5, 0)), 16, sizes, merges=True))
    for case, dtype in itertools.product(cases, (torch.bfloat16, torch.float16)):
        check_case(case, dtype)


def check_case(case: OpCase, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = case.make(dtype, DEVICE)
    copies = tuple(a.clone() if i in case.mutated else a for i, a in enumerate(args))
    expected = [case.op.reference(*args), *(args[i] for i in case.mutated)]
    found = [case.op.implementations()["triton"].run(*copies), *(copies[i] for i in case.mutated)]
    for ours, theirs in zip(flat(found), flat(expected), strict=True):
        if theirs.dtype == torch.float8_e4m3fn:  # a tie may fall either way, by one unit
            off = (ours.float() - theirs.float()).abs() > 0.13 * theirs.float().abs() + 2e-3
            expect(not off.any(), f"{case} {dtype} {int(off.sum())} off by more than a unit")
        else:
            worst = error(ours, theirs)
            expect(worst < 0.1, f"{case} {dtype} error {worst:.3g}")


def flat(results: list) -> list[Tensor]:
    return [x for r in results for x in (r if isinstance(r, tuple) else (r,)) if x is not None]


def check_graph() -> None:
    args = mla_decode_case(600, 90, 1500, heads=16, latent=512, rotary=64).make(
        torch.bfloat16, DEVICE
    )
    kv_lens_N, full_lens_N = args[4], args[4].clone()
    kv_lens_N.fill_(3)
    mla_decode(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_decode(*args)
    for lens_N in (full_lens_N, full_lens_N // 2, torch.ones_like(full_lens_N)):
        kv_lens_N.copy_(lens_N)
        graph.replay()
        worst = error(out, mla_decode.reference(*args))
        expect(worst < 0.1, f"captured decode of {lens_N.tolist()} tokens: error {worst:.3g}")


def check_pieces() -> None:
    case = AttentionCase(((1, 50), (200, 9200), (64, 64), (1, 3000)), 1, block_size=BLOCK)
    batch = make_attention(case, torch.bfloat16, DEVICE).batch
    num_blocks = int(batch.block_table_RM.max()) + 1
    cache_BSA = torch.randn(num_blocks, BLOCK, LATENT + ROPE, device=DEVICE).bfloat16()
    weight_HEC = torch.randn(16, NOPE + VALUE, LATENT, device=DEVICE).bfloat16() * LATENT**-0.5
    q_THK = torch.randn(batch.num_tokens, 16, NOPE + ROPE, device=DEVICE).bfloat16()
    q_THD, q_THR = q_THK[1:].split((NOPE, ROPE), dim=2)

    def run(piece_tokens: int) -> Tensor:
        plan = plan_prefill(batch, BLOCK, piece_tokens)
        kv_TA = cached(cache_BSA, batch.slots_T[1:], torch.bfloat16)
        return prefill(q_THD, q_THR, kv_TA, weight_HEC, cache_BSA, plan, VALUE, SCALE)

    run(4096)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = {piece_tokens: run(piece_tokens) for piece_tokens in (512, 4096, 1 << 20)}
    torch.cuda.set_sync_debug_mode("default")
    keys_HDC, values_HVC = weight_HEC.split((NOPE, VALUE), dim=1)
    position_T = batch.positions_T[1:]
    row_T = batch.rows_N.repeat_interleave(batch.query_starts_N1.diff())[1:]
    absorbed_THC = mla_decode(
        torch.einsum("thd,hdc->thc", q_THD, keys_HDC), q_THR, cache_BSA, row_T,
        (position_T + 1).int(), batch.block_table_RM, SCALE, batch.max_kv_len,
    )  # fmt: skip
    expected = torch.einsum("thc,hvc->thv", absorbed_THC, values_HVC)
    for piece_tokens, out_THV in found.items():
        worst = error(out_THV, expected)
        expect(worst < 0.2, f"prefixes in pieces of {piece_tokens}: error {worst:.3g}")


def time_decodes() -> None:
    for heads, fp8 in ((16, False), (16, True), (128, False)):
        for num_entries, kv_len in ((1, 1024), (1, 32768), (32, 1024), (32, 8192), (128, 4096)):
            case = mla_decode_case(
                *[kv_len] * num_entries, heads=heads, latent=512, rotary=64, block_size=BLOCK,
                fp8=fp8,
            )  # fmt: skip
            args = case.make(torch.bfloat16, DEVICE)
            ms = triton.testing.do_bench_cudagraph(lambda args=args: mla_decode(*args))
            read = num_entries * kv_len * (LATENT + ROPE) * args[2].element_size()
            bound = read / READ_TBPS / 1e9
            print(
                f"decode {heads:3d} heads {num_entries:3d} x {kv_len:5d}{' fp8' * fp8}: "
                f"{1000 * ms:7.1f} us, {ms / bound:5.1f} times the read"
            )


def time_prompts() -> None:
    for heads, num_tokens in ((16, 2048), (16, 8192), (128, 2048)):
        case = mla_attend_case(((num_tokens, num_tokens),), heads, (NOPE, ROPE, VALUE), causal=True)
        args = case.make(torch.bfloat16, DEVICE)
        ms = triton.testing.do_bench(lambda args=args: mla_attend(*args))
        flops = heads * num_tokens**2 * (NOPE + ROPE + VALUE)
        print(
            f"prompt {heads:3d} heads {num_tokens:5d}: {ms:7.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s"
        )


def main() -> None:
    checks = {
        "ops": (check_ops,),
        "layer": (check_graph, check_pieces),
        "times": (time_decodes, time_prompts),
    }
    for name in sys.argv[1:] or checks:
        for check in checks[name]:
            check()
    sys.exit(f"{len(FAILED)} checks failed" if FAILED else 0)


if __name__ == "__main__":
    main()
