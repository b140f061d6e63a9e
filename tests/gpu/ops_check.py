"""Every implementation of every op on this GPU, and paged attention, against their references.

    PYTHONPATH=src python tests/gpu/ops_check.py [OP ...] [--skip OP ...] [--jobs N]

The small cases of the op tests in bf16 and fp16. Each op has a process of its own: after an illegal
access nothing else of that process can be trusted.
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "ops"))

ATTENTION = "attention"
ATTENTION_PARTS = [f"{ATTENTION} {i}" for i in range(8)]  # shapes of heads in turn, side by side
HOPPER = "hopper_prefill"  # the attention kernel of one kind of GPU, beside the one of all
TIMEOUT_S = 280.0  # of one op: compiling takes most of it


def check_op(name: str) -> int:
    """In this process; prints what is wrong and returns how much was compared."""
    import torch
    from op_cases import OP_CASES
    from op_compare import differences

    device = torch.device("cuda")
    num_run = 0
    for case in (case for case in OP_CASES if case.op.__name__ == name):
        for impl in case.op.implementations().values():
            for dtype in (torch.bfloat16, torch.float16):
                if impl.needs.kind != "cuda" or impl.needs.missing():
                    continue
                if impl.fits is not None and not impl.fits(*case.make(dtype, device)):
                    continue
                for wrong in tried(lambda c=case, i=impl, d=dtype: differences(c, i, d, device)):
                    print(f"FAIL {case} {impl.name} {dtype}: {wrong}", flush=True)
                num_run += 1
    return num_run


def check_attention(part: str) -> int:
    import torch
    from op_cases import gpu_attention_cases, make_attention

    from penstock.kernels.attention import triton_decode, triton_prefill
    from penstock.kernels.attention.backend import get_backend, quantized_output
    from penstock.kernels.tolerances import tolerance

    usual_load = triton_decode.load_of

    def compare(case, args) -> Iterator[str]:
        """However many sequences there are, with the launch config of every load."""
        expected = get_backend("reference").attend(*args.unpack())
        close = tolerance(dtype)
        for load in (None, *triton_decode.Load) if case.num_decodes else (None,):
            triton_decode.load_of = (lambda *_, load=load: load) if load else usual_load
            found = get_backend("triton").attend(*args.unpack())
            if not torch.allclose(found, expected, atol=close.atol, rtol=close.rtol):
                off = (found - expected).abs().nan_to_num(torch.inf).max().item()
                yield f"off by {off:.3g}, load {load}"
            scale_1 = found.abs().max().view(1).float() / 448
            in_8_bits = (*args.unpack(), scale_1)
            as_8_bits = get_backend("triton").attend(*in_8_bits)
            if not torch.equal(as_8_bits.float(), quantized_output(found, scale_1).float()):
                yield f"the FP8 output differs, load {load}"

    num_run = 0
    shapes: dict[tuple[int, ...], str] = {}
    for case in gpu_attention_cases():
        shape = (case.num_heads, case.num_kv_heads, case.head_size)
        if shapes.setdefault(shape, ATTENTION_PARTS[len(shapes) % len(ATTENTION_PARTS)]) != part:
            continue
        for dtype in (torch.bfloat16, torch.float16):
            if dtype == torch.float16 and case.head_size != 128:
                continue
            args = make_attention(case, dtype, torch.device("cuda"))
            for wrong in tried(lambda case=case, args=args: compare(case, args)):
                print(f"FAIL attention {case} {dtype}: {wrong}", flush=True)
            num_run += 1
    if triton_prefill._HOPPER.module(torch.empty(0, device="cuda")) is None:
        print("FAIL attention: the kernel for Hopper was given up, see above", flush=True)
    return num_run


def hopper_cases() -> Iterator[tuple[Any, Any]]:
    """(case, dtype): chunks with and without a prefix; block and group sizes, windows, sinks."""
    import torch
    from op_cases import AttentionCase

    entries = ((1, 40), (300, 300), (100, 900), (1, 77), (128, 128), (64, 1300), (7, 130))
    for number, (group, block_size, window, sinks) in enumerate(
        (
            (1, 16, None, False),
            (4, 16, 100, True),
            (4, 32, None, False),
            (8, 32, None, True),
            (8, 64, 128, False),
            (5, 64, None, True),
            (1, 128, 300, True),
            (16, 128, None, False),
        )
    ):
        shape: Any = dict(num_heads=2 * group, head_size=128, block_size=block_size)
        for dtype in (torch.bfloat16, torch.float16)[: 1 + (number < 4)]:
            yield AttentionCase(entries, 1, **shape, window=window, sinks=sinks), dtype


def check_hopper() -> int:
    """The kernel for Hopper against the reference and the kernel of all GPUs, with NaN in blocks of
    the cache that no query sees, and strided queries."""
    import torch
    from op_cases import make_attention, spoil_unseen

    from penstock.kernels.attention import hopper_prefill, triton_prefill
    from penstock.kernels.attention.backend import get_backend
    from penstock.kernels.tolerances import tolerance

    def compare(args) -> Iterator[str]:
        q, k, v, batch, params, sinks, _ = args.unpack()
        expected = get_backend("reference").attend(*args.unpack())
        qkv = torch.cat((q, q.new_full((len(q), 4, q.shape[2]), torch.nan)), dim=1)
        spoil_unseen(args, whole_blocks=True)  # what is copied are blocks
        first, begin = batch.num_decodes, int(batch.query_starts_N1[batch.num_decodes])
        close = tolerance(q.dtype)
        usual = partial(triton_prefill.prefill, config=triton_prefill.PrefillConfig())
        for name, run in (("hopper", hopper_prefill.prefill), ("triton", usual)):
            found = torch.zeros_like(q)
            run(
                qkv[:, : q.shape[1]], k, v, batch.rows_N, batch.query_starts_N1, batch.kv_lens_N,
                batch.block_table_RM, found, params, first, sinks_H=sinks,
            )  # fmt: skip
            if found[:begin].any():
                yield f"{name} wrote rows of decodes"
            a, b = found[begin:], expected[begin:]
            if not torch.allclose(a, b, atol=close.atol, rtol=close.rtol):
                yield f"{name} off by {(a - b).abs().nan_to_num(torch.inf).max().item():.3g}"

    num_run = 0
    for case, dtype in hopper_cases():
        args = make_attention(case, dtype, torch.device("cuda"))
        assert hopper_prefill.fits(args.q_THD, args.k_cache_BKSD), case
        args.params = replace(args.params, v_scale=0.75)
        for wrong in tried(lambda args=args: compare(args)):
            print(f"FAIL {HOPPER} {case} {dtype}: {wrong}", flush=True)
        num_run += 1
    return num_run


def tried(compare) -> Iterator[str]:
    """What `compare` finds; an error is a finding like any other, one of the device the last."""
    import torch

    try:
        yield from compare()
        torch.cuda.synchronize()
    except Exception as error:
        yield f"{type(error).__name__} {str(error)[:300]}"
        if "CUDA error" in str(error):
            print("FAIL the device is lost to this process", flush=True)
            sys.exit(1)


def run_apart(name: str) -> tuple[str, int, str]:
    """(op, its number of failures, what it printed)."""
    command = [sys.executable, __file__, "--inside", name]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as stuck:
        said = stuck.stdout.decode() if isinstance(stuck.stdout, bytes) else stuck.stdout or ""
        return name, 1, f"{said}FAIL {name}: not done after {TIMEOUT_S:.0f} s"
    num_failed = done.stdout.count("FAIL ")
    said = done.stdout if num_failed or not done.returncode else done.stdout + done.stderr[-1500:]
    return name, num_failed or int(done.returncode != 0), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--skip", nargs="+", default=[], metavar="OP")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--inside", metavar="OP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        checks: dict[str, Callable[[], int]] = {
            part: partial(check_attention, part) for part in ATTENTION_PARTS
        }
        checks[HOPPER] = check_hopper
        num_run = checks.get(args.inside, lambda: check_op(args.inside))()
        if not num_run:
            print(f"FAIL {args.inside}: no implementation fits this device")
        print(f"compared {num_run}")
        return
    import torch
    from op_cases import OP_CASES

    began = time.monotonic()
    # Those that compile the longest first.
    attention = [ATTENTION] + [HOPPER] * (torch.cuda.get_device_capability()[0] == 9)
    names = args.ops or [*attention, *dict.fromkeys(case.op.__name__ for case in OP_CASES)]
    names = [name for name in names if name not in args.skip]
    if ATTENTION in names:
        names[:] = [*ATTENTION_PARTS, *(name for name in names if name != ATTENTION)]
    results = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in concurrent.futures.as_completed(pool.submit(run_apart, name) for name in names):
            name, num_failed, said = done.result()
            results.append((name, num_failed, said))
            print(said.strip() if num_failed else f"{name}: {said.strip()}", flush=True)
    failed = [name for name, num_failed, _ in results if num_failed]
    seconds = time.monotonic() - began
    total = sum(int(said.rsplit("compared ", 1)[-1]) for _, n, said in results if not n)
    print(f"{len(names) - len(failed)} of {len(names)} ops, {total} comparisons, {seconds:.0f} s")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
