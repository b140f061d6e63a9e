"""What kernels ask the driver for; the rest is the driver's and is measured on a GPU."""

import ctypes
from types import SimpleNamespace

import pytest

from penstock.kernels import carveout
from penstock.kernels.carveout import AS_USUAL, beside_products, divide


@pytest.fixture
def asked(monkeypatch):
    """(function, attribute, percent) of every call of the driver."""
    calls: list[tuple[int | None, int, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        calls.append((function.value, attribute, value))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    monkeypatch.setattr(carveout, "_asked", {})
    return calls


def test_the_driver_is_asked_when_something_changes(asked):
    one, other = SimpleNamespace(function=0x7F0000000010), SimpleNamespace(function=0x20)
    for kernel, percent in ((one, AS_USUAL), (one, 100), (one, 100), (other, 45), (one, AS_USUAL)):
        divide(kernel, percent)
    assert asked == [(0x7F0000000010, 9, 100), (0x20, 9, 45), (0x7F0000000010, 9, AS_USUAL)]


def test_a_launch_without_a_kernel_asks_for_nothing(asked):
    divide(None, 100)
    assert not asked


@pytest.mark.parametrize(("num_tokens", "percent"), [(1, -1), (2, 100), (512, 100), (513, -1)])
def test_small_kernels_follow_products_of_several_tokens(num_tokens, percent):
    assert beside_products(num_tokens) == percent
