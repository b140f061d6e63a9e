"""How close an implementation must come to its reference, by dtype; used by every op test."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    atol: float
    rtol: float


# References compute in float32 and round once. An implementation may round at another place, so
# it may be off by a few units in the last place of the dtype: 2^-8 for bfloat16, 2^-11 for float16.
_TOLERANCES = {
    torch.float32: Tolerance(atol=2e-5, rtol=2e-5),
    torch.float16: Tolerance(atol=2e-3, rtol=2e-3),
    torch.bfloat16: Tolerance(atol=1.6e-2, rtol=1.6e-2),
    torch.float8_e4m3fn: Tolerance(atol=2e-3, rtol=0.13),  # one unit: a tie may fall either way
}
_EXACT = Tolerance(atol=0.0, rtol=0.0)  # indices and copies


def tolerance(dtype: torch.dtype) -> Tolerance:
    return _TOLERANCES.get(dtype, _EXACT)
