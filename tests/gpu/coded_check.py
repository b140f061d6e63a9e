"""Products with coded weights of real sizes on this GPU, against the reference.

    PYTHONPATH=src python tests/gpu/coded_check.py

Each format, and as many tokens as each launch shape takes, by several processes: compiling kernels
takes the time. The small cases of every implementation: ops_check.py.
"""

import multiprocessing
import sys
from typing import Any

import torch

from penstock.kernels.coded import Coded, coded_linear, pack_coded
from penstock.kernels.coded.weights import TILE
from penstock.kernels.tolerances import tolerance

FORMATS: dict[str, tuple[Any, int, bool]] = {  # (kind, group, has zero points)
    "AWQ": ("int4", 128, True),
    "GPTQ": ("int4", 128, False),
    "int4, groups of 32": ("int4", 32, True),
    "int4, groups of 256": ("int4", 256, True),
    "NVFP4": ("fp4", 16, False),
    "nf4": ("nf4", 64, False),
    "int8": ("int8", 0, False),
    "e4m3": ("e4m3", 0, False),
}
TOKENS = (1, 16, 31, 64, 200, 256, 400)
SHAPES = ((1040, 2048), (4096, 14336))  # outputs, inputs
NUM_WORKERS = 8
DEVICE = torch.device("cuda")


def drawn(kind: Any, num_outputs: int, num_inputs: int, group: int, has_zeros: bool) -> Coded:
    shape = (num_outputs, num_inputs // (group or num_inputs))
    num_codes = 256 if kind == "int8" else 127 if kind == "e4m3" else 16
    codes = torch.randint(0, num_codes, (num_outputs, num_inputs), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(shape, device=DEVICE) + 0.5
    deviation = {"int4": 4.6, "int8": 74.0, "nf4": 0.55, "fp4": 3.1, "e4m3": 140.0}[kind]
    scales /= 6.5 if has_zeros else deviation  # weights of about one
    scales = scales.to(torch.float8_e4m3fn if kind == "fp4" else torch.float16)
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    return Coded(kind, codes, scales, zeros)


def problems(name: str) -> list[str]:
    torch.manual_seed(0)
    kind, group, has_zeros = FORMATS[name]
    found, close = [], tolerance(torch.bfloat16)
    for num_outputs, num_inputs in SHAPES:
        weight = pack_coded([drawn(kind, num_outputs, num_inputs, group, has_zeros)])
        assert weight is not None and weight.num_tiles == num_inputs // TILE
        bias = torch.randn(num_outputs, device=DEVICE, dtype=torch.bfloat16)
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, num_inputs, device=DEVICE, dtype=torch.bfloat16)
            x /= num_inputs**0.5
            expected = coded_linear.reference(x, weight, bias)
            try:
                torch.testing.assert_close(
                    coded_linear(x, weight, bias), expected, atol=close.atol, rtol=close.rtol
                )
            except Exception as error:
                what = " ".join(str(error).split())[:300]
                found.append(f"{name}, {num_tokens} x {num_inputs} x {num_outputs}: {what}")
    return found


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        found = pool.map(problems, FORMATS, chunksize=1)
    for name, wrong in zip(FORMATS, found, strict=True):
        print(f"{name}: {len(wrong)} wrong", *wrong, sep="\n  ")
    sys.exit(1 if any(found) else 0)


if __name__ == "__main__":
    main()
