"""The gated delta net on this GPU: its ops against their references at Qwen3-Next's shapes, times.

    PYTHONPATH=src python tests/gpu/delta_check.py [ops] [graph] [times]

ops: the small cases of the op tests in bf16 and fp16; then decodes, whole prompts and chunks that
go on from a state, of the published model; the rotation of a quarter of gated heads, their gates.
graph: decodes captured with padding rows follow their states, and the host waits for nothing.
times: inside a CUDA graph, beside what the bytes alone would take (an H200 copies 4.28 TB/s);
prompts also in TFLOP/s.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("ops", "fixtures")]

from op_cases import (  # noqa: E402
    OP_CASES,
    OpCase,
    conv_case,
    delta_case,
    gated_norm_case,
    gates_case,
    rope_case,
    sigmoid_case,
)

from penstock.kernels.recurrent import (  # noqa: E402
    causal_conv,
    delta_gates,
    gated_delta,
    rms_norm_gated,
)

DEVICE = torch.device("cuda")
COPY_TBPS = 4.28
KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 16, 32, 128, 4  # of keys and of values
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
COLUMNS = CHANNELS + VALUE_HEADS * SIZE
CHUNK = 64
DECODES = tuple(((1,) * num, num) for num in (1, 32, 256))
PROMPTS = (((1024,), 0), ((8192,), 0), ((1024,) * 8, 0))
CHUNKS = (((1, 1, 1, 300, 2048, 64, 1), 3), ((2049, 511, 7), 0))  # go on, but every third entry
RECURRENT = (
    "causal_conv",
    "gated_delta",
    "keep_conv",
    "keep_delta",
    "delta_gates",
    "rms_norm_gated",
)
FAILED: list[str] = []


def expect(ok: bool, what: str) -> None:
    print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        FAILED.append(what)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest one, as a share of the number and the root mean square; NaN is left out."""
    is_known = ~theirs.float().isnan()  # slots whose sequence begins hold NaN before
    ours, theirs = ours.float()[is_known], theirs.float()[is_known]
    found = (ours - theirs).abs() / (theirs.abs() + theirs.square().mean().sqrt())
    return found.max().nan_to_num(torch.inf).item()


def check_ops() -> None:
    small = [case for case in OP_CASES if case.op.__name__ in (*RECURRENT, "sigmoid_mul")]
    for case, dtype in itertools.product(small, (torch.bfloat16, torch.float16)):
        check_case(case, dtype)
    for lens, num_decodes in (*DECODES, *PROMPTS, *CHUNKS):
        check_case(conv_case(lens, num_decodes, CHANNELS, COLUMNS, TAPS, SIZE), torch.bfloat16)
        sizes = (KEY_HEADS, VALUE_HEADS, SIZE, SIZE)
        for decay in (0.02, 2.0):
            check_case(delta_case(lens, num_decodes, *sizes, decay=decay), torch.bfloat16)
    for num_tokens in (1, 256, 8192):
        check_case(gates_case(num_tokens, KEY_HEADS, VALUE_HEADS), torch.bfloat16)
        check_case(gated_norm_case(num_tokens, KEY_HEADS, VALUE_HEADS, SIZE), torch.bfloat16)
        check_case(sigmoid_case(num_tokens, 16, 256), torch.bfloat16)
    for fp8 in (False, True):
        rope = rope_case(100, 16, 2, 256, 64, block_size=32, norm=True, fp8=fp8, gates=True)
        check_case(rope, torch.bfloat16)


def check_case(case: OpCase, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = case.make(dtype, DEVICE)
    copies = tuple(a.clone() if i in case.mutated else a for i, a in enumerate(args))
    expected = flat([case.op.reference(*args), *(args[i] for i in case.mutated)])
    found = flat(
        [case.op.implementations()["triton"].run(*copies), *(copies[i] for i in case.mutated)]
    )
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if theirs.dtype == torch.float8_e4m3fn:  # a tie may fall either way, by one unit
            off = (ours.float() - theirs.float()).abs() > 0.13 * theirs.float().abs() + 2e-3
            expect(not off.any(), f"{shortened(case)} {int(off.sum())} off by more than a unit")
            continue
        worst = error(ours, theirs)
        expect(worst < 0.02, f"{shortened(case)} {dtype} result {number} error {worst:.3g}")


def shortened(case: OpCase) -> str:
    name = str(case)
    return name if len(name) < 70 else f"{name[:40]}...{name[-25:]}"


def flat(results: list[Any]) -> list[Tensor]:
    return [x for r in results for x in (r if isinstance(r, tuple) else (r,)) if x is not None]


def check_graph() -> None:
    """Four rows, of which the step uses some and padding, which has no state and slot 0."""
    torch.manual_seed(0)
    num = 4
    q, k, v, g, beta, state, slots, has_state, starts, *_ = delta_case(
        (1,) * num, num, KEY_HEADS, VALUE_HEADS, SIZE, SIZE
    ).make(torch.bfloat16, DEVICE)
    state = torch.randn_like(state)
    slots.zero_()
    has_state.zero_()
    args = (q, k, v, g, beta, state, slots, has_state, starts, num)
    gated_delta(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta(*args)
    for rows in ([3, 1, 5, 2], [5, 0, 0, 0], [2, 3, 0, 0]):
        slots.copy_(torch.tensor(rows, dtype=torch.int32))
        has_state.copy_(slots > 0)
        theirs = state.clone()
        expected = gated_delta.reference(*args[:5], theirs, *args[6:])
        graph.replay()
        num_real = sum(row > 0 for row in rows)
        real = torch.tensor(rows[:num_real], device=DEVICE)
        worst = max(error(out[:num_real], expected[:num_real]), error(state[real], theirs[real]))
        expect(worst < 0.02, f"captured decode of slots {rows}: error {worst:.3g}")
        others = [slot for slot in range(1, len(state)) if slot not in rows]
        expect(torch.equal(state[others], theirs[others]), f"slots {others} are left alone")


def check_waiting() -> None:
    cases = [
        conv_case(*CHUNKS[0], CHANNELS, COLUMNS, TAPS, SIZE),
        delta_case(*CHUNKS[0], KEY_HEADS, VALUE_HEADS, SIZE, SIZE),
    ]
    for case in cases:
        args = case.make(torch.bfloat16, DEVICE)
        case.op(*args)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        case.op(*args)
        torch.cuda.set_sync_debug_mode("default")
        expect(True, f"{case.op.__name__} waits for nothing")


def timed(name: str, case: OpCase, num_bytes: int, num_flops: int = 0) -> None:
    """`num_bytes` that are read and written at least."""
    args = case.make(torch.bfloat16, DEVICE)
    for i in case.mutated:
        args[i].nan_to_num_()
    ms = triton.testing.do_bench_cudagraph(lambda: case.op(*args))
    bound = num_bytes / COPY_TBPS / 1e9
    rate = f", {num_flops / ms / 1e9:4.0f} TFLOP/s" if num_flops else ""
    print(
        f"{name:28s}: {1000 * ms:8.1f} us, {1000 * bound:7.1f} us for its bytes, "
        f"{ms / bound:5.1f} times{rate}",
        flush=True,
    )


def check_times() -> None:
    state_bytes = 2 * VALUE_HEADS * SIZE * SIZE * 4
    past_bytes = 2 * (TAPS - 1) * CHANNELS * 2
    for lens, num_decodes in (*DECODES, *PROMPTS):
        num_tokens, num = sum(lens), len(lens)
        shape = f"{num} x {lens[0]}"
        timed(
            f"{causal_conv.__name__} {shape}",
            conv_case(lens, num_decodes, CHANNELS, COLUMNS, TAPS, SIZE),
            num_tokens * 2 * CHANNELS * 2 + num * past_bytes,
        )
        # Of a chunk: two matmuls of rows, three with the state, two with the writes.
        per_token = VALUE_HEADS * 2 * SIZE * (2 * CHUNK + 3 * SIZE + 2 * CHUNK)
        timed(
            f"{gated_delta.__name__} {shape}",
            delta_case(lens, num_decodes, KEY_HEADS, VALUE_HEADS, SIZE, SIZE),
            num_tokens * (CHANNELS + VALUE_HEADS * SIZE) * 2 + num * state_bytes,
            0 if num_decodes else num_tokens * per_token,
        )
        timed(
            f"{delta_gates.__name__} {shape}",
            gates_case(num_tokens, KEY_HEADS, VALUE_HEADS),
            num_tokens * VALUE_HEADS * (2 * 2 + 2 * 4),
        )
        timed(
            f"{rms_norm_gated.__name__} {shape}",
            gated_norm_case(num_tokens, KEY_HEADS, VALUE_HEADS, SIZE),
            num_tokens * VALUE_HEADS * SIZE * 3 * 2,
        )


def main() -> None:
    checks = {"ops": (check_ops,), "graph": (check_graph, check_waiting), "times": (check_times,)}
    for name in sys.argv[1:] or checks:
        for check in checks[name]:
            check()
    sys.exit(f"{len(FAILED)} checks failed" if FAILED else 0)


if __name__ == "__main__":
    main()
