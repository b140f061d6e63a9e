"""The kernels of block-scaled products on this GPU, against their references.

    PYTHONPATH=src python tests/gpu/block_scaled_check.py

Before Blackwell Triton computes `tl.dot_scaled` in BF16: that shows whether addresses, scales and
epilogues are right, and nothing of the instruction or of its speed.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "ops")]

from op_cases import OP_CASES  # noqa: E402
from op_compare import differences  # noqa: E402

from penstock.kernels.device import probe  # noqa: E402

CUDA = torch.device("cuda")
OPS = ("quantize_mxfp8", "quantize_nvfp4", "scaled_linear", "scaled_experts")


def main() -> int:
    num_run, wrong = 0, []
    for case in OP_CASES:
        if case.op.__name__ not in OPS:
            continue
        impl = case.op.implementations()["triton"]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            num_run += 1
            wrong += [f"{case} {dtype}: {one}" for one in differences(case, impl, dtype, CUDA)]
    for line in wrong:
        print(f"FAIL {line}")
    print(f"block-scaled on {probe().name} (sm_{probe().arch}): {num_run} compared")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
