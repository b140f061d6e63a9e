"""INT4 as E4M3: the packed form, and the instructions that a GPU has in the place of what Triton's
interpreter runs. These are read here one by one; no GPU does."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.gemm.w4a8 import pack_w4a8
from penstock.kernels.quantized_weight import QuantizedWeight

pytest.importorskip("triton")
INTEGERS = torch.arange(-8, 8)
PTX = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.b32": lambda a, b: a >> b,
}


def executed(program: str, word: int) -> int:
    """What straight-line PTX leaves in $0 where $1 is the word."""
    registers = {"$1": word}
    for line in re.sub(r"[{}]", "", program).split(";"):
        name, *operands = line.replace(",", " ").split() or [""]
        if name not in ("", ".reg"):
            to, *read = operands
            registers[to] = PTX[name](
                *(registers[one] if one in registers else int(one, 0) for one in read)
            )
    return registers["$0"]


def integers(part: QuantizedWeight) -> Tensor:
    return part.codes_OI.float() - 8


def every_pair() -> QuantizedWeight:
    """All pairs of codes, and scales of one."""
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack((low.reshape(4, 64), high.reshape(4, 64)), 1).flatten(1).to(torch.uint8)
    return QuantizedWeight("int4", codes, torch.ones(4, 1), input_scale=torch.tensor(0.5))


def test_packed_integers_are_those_of_the_checkpoint() -> None:
    part = every_pair()
    weight = pack_w4a8([part, part])
    assert weight is not None and weight.group == 128
    assert torch.equal(weight.values(), integers(part).repeat(2, 1))


def test_the_instructions_make_e4m3_of_every_integer() -> None:
    from penstock.kernels.gemm.w4a8_triton import HIGH_AS_E4M3, LOW_AS_E4M3

    part = every_pair()
    weight = pack_w4a8([part])
    assert weight is not None
    words = weight.halves_OB.flatten().view(torch.uint32).tolist()
    halves = []
    for program in (LOW_AS_E4M3.value, HIGH_AS_E4M3.value):
        made = torch.tensor([executed(program, word) for word in words], dtype=torch.uint32)
        numbers = made.view(torch.float8_e4m3fn).float() * 2**9
        halves.append(numbers.view(4, 64))
    assert torch.equal(torch.cat(halves, 1), integers(part))
    assert set(halves[0].flatten().tolist()) == set(INTEGERS.tolist())


@pytest.mark.parametrize(
    "change",
    [
        {"input_scale": None},
        {"zeros_OG": torch.full((4, 1), 7, dtype=torch.uint8)},
        {"scales_OG": torch.ones(4, 2)},
    ],
)
def test_what_the_kernel_cannot_multiply_is_not_packed(change: dict) -> None:
    assert pack_w4a8([every_pair(), replace(every_pair(), **change)]) is None
    assert pack_w4a8([replace(every_pair(), **change)]) is None
