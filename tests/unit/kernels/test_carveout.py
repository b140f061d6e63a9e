"""What kernels ask of the driver, on a fake driver. What it brings is measured on a GPU
(`benchmarks/table.py`): no result depends on it."""

import ctypes
from types import SimpleNamespace

import pytest

from penstock.kernels import carveout
from penstock.kernels.carveout import DRIVER_DEFAULT, between_gemms, set_carveout


@pytest.fixture
def asked(monkeypatch):
    """(function, percent) of every call of the driver."""
    calls: list[tuple[int | None, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        calls.append((function.value, value))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    monkeypatch.setattr(carveout, "_asked", {})
    return calls


def test_the_driver_is_asked_when_something_changes(asked):
    """And not with every launch: a call of the driver takes as long as one."""
    one, other = SimpleNamespace(function=0x7F0000000010), SimpleNamespace(function=0x20)
    for kernel, percent in (
        (one, DRIVER_DEFAULT),
        (one, 100),
        (one, 100),
        (other, 45),
        (one, DRIVER_DEFAULT),
    ):
        set_carveout(kernel, percent)
    assert asked == [(0x7F0000000010, 100), (0x20, 45), (0x7F0000000010, DRIVER_DEFAULT)]


def test_a_launch_without_a_kernel_asks_for_nothing(asked):
    set_carveout(None, 100)
    assert not asked


def test_small_kernels_follow_the_gemms_of_a_decode_batch_and_of_no_other_step():
    """Those of one token read through the L1 cache, those of a prompt take far longer than a
    switch: there the driver decides."""
    assert between_gemms(1) == between_gemms(8192) == DRIVER_DEFAULT
    in_decodes = {between_gemms(num_tokens) for num_tokens in range(2, 257)}
    assert len(in_decodes) == 1 and DRIVER_DEFAULT not in in_decodes
