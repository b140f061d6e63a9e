"""`@op`: which implementation a call gets."""

import sys

import pytest
import torch

from penstock.kernels.op import Needs, arch, cpu, op


@op
def double(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Twice x."""
    return x * 2 * times


def test_without_implementations_the_reference_runs() -> None:
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double(torch.ones(2), times=2).tolist() == [4, 4]
    assert double.explain(torch.ones(2)) == "double: reference"


def test_first_implementation_that_fits_gets_the_call_and_the_pick_is_kept() -> None:
    @op
    def size(x: torch.Tensor) -> str:
        return "reference"

    asked = []

    def is_even(x: torch.Tensor) -> bool:
        asked.append(x.shape)
        return x.shape[0] % 2 == 0

    size.impl("long", needs=cpu(), fits=lambda x: x.shape[0] > 4)(lambda x: "long")
    size.impl("even", needs=cpu(), fits=is_even)(lambda x: "even")

    assert [size(torch.ones(n)) for n in (6, 2, 3, 6, 3)] == [
        "long", "even", "reference", "long", "reference",
    ]  # fmt: skip
    assert asked == [(2,), (3,)]
    assert size.explain(torch.ones(2)) == "size: even; long does not fit these shapes"


def test_implementation_for_another_device_is_never_picked() -> None:
    @op
    def where(x: torch.Tensor) -> str:
        return "reference"

    where.impl("gpu", needs=arch(80))(lambda x: "gpu")
    assert where(torch.ones(1)) == "reference"


def test_implementation_for_every_shape_hides_later_ones() -> None:
    @op
    def who(x: torch.Tensor) -> str:
        return "reference"

    who.impl("first", needs=cpu())(lambda x: "first")
    who.impl("second", needs=cpu())(lambda x: "second")
    assert who(torch.ones(1)) == "first"
    with pytest.raises(AssertionError):
        who.impl("first", needs=cpu())(lambda x: "again")


def test_a_cpu_process_does_not_load_the_gpu_module() -> None:
    @op(gpu_module="penstock.kernels.no_such_module")
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    assert plain(torch.ones(1)).item() == 1
    assert "penstock.kernels.no_such_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        plain.implementations()


def op_that_says_who():
    """An op whose first implementation never fits, so that what is picked is remembered."""

    @op
    def who(x: torch.Tensor) -> str:
        return "reference"

    who.impl("none", needs=cpu(), fits=lambda x: False)(lambda x: "none")
    who.impl("floats", needs=cpu(), fits=lambda x: x.dtype == torch.float32)(lambda x: "floats")
    return who


def test_what_was_picked_for_one_dtype_or_shape_is_not_taken_for_another() -> None:
    who = op_that_says_who()
    who.impl("pairs", needs=cpu(), fits=lambda x: x.shape == (2,))(lambda x: "pairs")
    for _ in range(2):
        assert who(torch.ones(3)) == "floats"
        assert who(torch.ones(3, dtype=torch.int32)) == "reference"
        assert who(torch.ones(2, dtype=torch.int32)) == "pairs"


def test_an_implementation_that_is_registered_later_is_picked_too() -> None:
    who = op_that_says_who()
    numbers = torch.ones(3, dtype=torch.int32)
    assert who(numbers) == "reference"
    who.impl("integers", needs=cpu(), fits=lambda x: x.dtype == torch.int32)(lambda x: "integers")
    assert who(numbers) == "integers"


class OnGpu:
    """Stands for a CUDA tensor."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, size: int) -> None:
        self.signature = size


def test_on_a_gpu_the_first_that_can_run_there_is_asked_first() -> None:
    """This machine counts as one without compute capability."""

    @op
    def size(x: OnGpu) -> str:
        return "reference"

    size.impl("cpu", needs=cpu())(lambda x: "cpu")
    size.impl("newer", needs=arch(80))(lambda x: "newer")
    size.impl("small", needs=Needs("cuda"), fits=lambda x: x.signature < 4)(lambda x: "small")
    assert [size(OnGpu(n)) for n in (3, 4, 3)] == ["small", "reference", "small"]
    size.impl("any", needs=Needs("cuda"))(lambda x: "any")
    assert [size(OnGpu(n)) for n in (3, 4)] == ["small", "any"]
    assert size.explain(OnGpu(4)).startswith("size: any; newer needs sm_80")
