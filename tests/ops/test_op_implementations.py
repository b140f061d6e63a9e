"""Every implementation of every op against the op's reference, tolerance by dtype."""

import inspect
import re

import pytest
import torch
from op_cases import CPU_OP_CASES, OP_CASES, OpCase
from op_compare import differences

from penstock.kernels.op import Impl

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes_of(impl: Impl) -> list[torch.dtype]:
    """Where kernels are interpreted, which is slow, bfloat16 stands for both of 16 bits."""
    is_interpreted = impl.needs.kind == "cuda" and not torch.cuda.is_available()
    return [torch.float32, torch.bfloat16] if is_interpreted else DTYPES


RUNS = [
    pytest.param(case, impl, dtype, id=f"{case}-{impl.name}-{dtype}".replace("torch.", ""))
    for case in OP_CASES + CPU_OP_CASES
    for impl in case.op.implementations().values()
    for dtype in dtypes_of(impl)
    if impl.fits is None or impl.fits(*case.make(dtype, torch.device("cpu")))
]


@pytest.mark.parametrize(("case", "impl", "dtype"), RUNS)
def test_implementation_gives_what_the_reference_gives(
    case: OpCase, impl: Impl, dtype: torch.dtype, device: torch.device
) -> None:
    if impl.needs.kind == "cpu":
        device = torch.device("cpu")
    if (missing := impl.needs.missing()) and impl.needs.native:
        pytest.skip(missing)
    assert differences(case, impl, dtype, device) == []


def test_every_implementation_is_run_by_some_case() -> None:
    """But for those of one generation of GPUs, which no interpreter runs: tests/gpu does."""
    ran = {(run.values[0].op.__name__, run.values[1].name) for run in RUNS}
    registered = {
        (case.op.__name__, name)
        for case in OP_CASES + CPU_OP_CASES
        for name, impl in case.op.implementations().items()
        if not impl.needs.max_arch
    }
    assert ran == registered


def test_implementations_have_the_parameters_of_their_reference() -> None:
    """Types are written once, at the reference; what follows its parameters has a default."""
    ops = {case.op.__name__: case.op for case in OP_CASES + CPU_OP_CASES}
    for name, op in ops.items():
        wanted = [_without_shape(n) for n in inspect.signature(op.reference).parameters]
        for impl in op.implementations().values():
            given = inspect.signature(impl.run).parameters
            assert [_without_shape(n) for n in given][: len(wanted)] == wanted, (name, impl.name)
            further = list(given.values())[len(wanted) :]
            assert all(p.default is not p.empty for p in further), (name, impl.name)


def _without_shape(name: str) -> str:
    """`weight_OI` -> `weight`: one kernel may serve several ops, whose shapes differ."""
    return re.sub(r"_[0-9A-Z]+$", "", name)
