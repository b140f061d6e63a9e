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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "ops"))

ATTENTION = "attention"
TIMEOUT_S = 150.0  # of one op: compiling takes most of it


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


def check_attention() -> int:
    import torch
    from op_cases import gpu_attention_cases, make_attention

    from penstock.kernels.attention.backend import get_backend
    from penstock.kernels.tolerances import tolerance

    def compare(args) -> list[str]:
        expected = get_backend("reference").attend(*args.unpack())
        found = get_backend("triton").attend(*args.unpack())
        close = tolerance(dtype)
        if torch.allclose(found, expected, atol=close.atol, rtol=close.rtol):
            return []
        return [f"off by {(found - expected).abs().nan_to_num(torch.inf).max().item():.3g}"]

    num_run = 0
    for case in gpu_attention_cases():
        for dtype in (torch.bfloat16, torch.float16):
            if dtype == torch.float16 and case.head_size != 128:
                continue
            args = make_attention(case, dtype, torch.device("cuda"))
            for wrong in tried(lambda args=args: compare(args)):
                print(f"FAIL attention {case} {dtype}: {wrong}", flush=True)
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
        num_run = check_attention() if args.inside == ATTENTION else check_op(args.inside)
        if not num_run:
            print(f"FAIL {args.inside}: no implementation fits this device")
        print(f"compared {num_run}")
        return
    from op_cases import OP_CASES

    began = time.monotonic()
    # Those that compile the longest first.
    names = args.ops or [ATTENTION, *dict.fromkeys(case.op.__name__ for case in OP_CASES)]
    names = [name for name in names if name not in args.skip]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run_apart, names))
    for _, num_failed, said in sorted(results, key=lambda result: -result[1]):
        if num_failed:
            print(said.strip())
    failed = [name for name, num_failed, _ in results if num_failed]
    seconds = time.monotonic() - began
    total = sum(int(said.rsplit("compared ", 1)[-1]) for _, n, said in results if not n)
    print(f"{len(names) - len(failed)} of {len(names)} ops, {total} comparisons, {seconds:.0f} s")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
