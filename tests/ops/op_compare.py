"""An implementation of an op against its reference: what is close enough, in one place."""

from typing import Any

import torch
from op_cases import OpCase
from torch import Tensor

from penstock.kernels.op import Impl
from penstock.kernels.tolerances import tolerance


def differences(case: OpCase, impl: Impl, dtype: torch.dtype, device: torch.device) -> list[str]:
    """One line for each result that is too far from the reference's."""
    torch.manual_seed(0)
    args = case.make(dtype, device)
    copies = tuple(a.clone() if i in case.mutated else a for i, a in enumerate(args))
    expected = _outputs(case.op.reference(*args), args, case.mutated)
    actual = _outputs(impl.run(*copies), copies, case.mutated)
    assert len(expected) == len(actual) > 0
    found = []
    for number, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want.shape != got.shape or want.dtype != got.dtype:
            found.append(f"result {number} is {got.dtype} {list(got.shape)}")
        elif not _is_close(want, got, case, dtype):
            worst = (got.double() - want.double()).abs().nan_to_num(torch.inf).max().item()
            size = want.double().square().mean().sqrt().item()
            found.append(f"result {number} is off by {worst:.3g}, its mean size is {size:.3g}")
    return found


def _outputs(result: Any, args: tuple[Any, ...], mutated: tuple[int, ...]) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in results if x is not None] + [args[i] for i in mutated]


def _is_close(want: Tensor, got: Tensor, case: OpCase, dtype: torch.dtype) -> bool:
    close = tolerance(want.dtype)
    if want.dtype == torch.float8_e4m3fn:
        got, want = got.float(), want.float()  # torch compares no 8-bit floats
    if case.quantizes_inside:
        # A number between two of 8 bits goes to either of them when it was rounded to 16 bits
        # before; in fp32 that is rare.
        mean, most = (0.001, 0.05) if dtype == torch.float32 else (0.03, 0.6)
        errors, size = (got.float() - want.float()).abs(), want.float().abs().mean()
        rms = want.float().square().mean().sqrt()
        return bool(errors.mean() < mean * size) and bool(errors.max() < most * rms)
    # Scales are fp32, but found from numbers that were rounded to the dtype before.
    rtol = max(close.rtol, tolerance(dtype).rtol) if want.dtype == torch.float32 else close.rtol
    atol = max(close.atol, tolerance(dtype).atol) if case.rounds_inside else close.atol
    return torch.allclose(got, want, atol=atol, rtol=rtol)
