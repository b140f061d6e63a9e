"""Launches of `kernels.launch.jit`, with a driver that notes them: this needs no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from penstock.kernels.launch import Kernel


def add(x_ptr, y_ptr, num, BLOCK: tl.constexpr): ...


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the compiled kernel is launched with."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(driver, "_active", active, raising=False)
    monkeypatch.setattr(type(driver), "active", property(lambda self: active), raising=False)
    return []


def kernel_that_notes(launches: list[tuple[Any, ...]], compiled: list[Any]) -> Kernel:
    kernel = Kernel(add)

    def bind(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
        options = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("num_w")}
        bound = dict(zip(("x_ptr", "y_ptr", "num"), args, strict=True)) | kwargs
        kinds = [
            (str(x.dtype), x.data_ptr() % 16) if isinstance(x, torch.Tensor) else ("i", x == 1)
            for x in args
        ]
        return bound, [*kinds, *kwargs.values()], options

    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert not warmup
        compiled.append(args)
        return SimpleNamespace(
            run=lambda *given: launches.append(given), function=5, packed_metadata="packed"
        )

    kernel.device_caches = {0: ({}, {}, None, None, bind)}
    kernel.run = run  # type: ignore[method-assign]
    return kernel


def test_the_second_launch_of_a_kind_is_not_tritons(launches: list[tuple[Any, ...]]) -> None:
    compiled: list[Any] = []
    kernel = kernel_that_notes(launches, compiled)
    x, y = torch.zeros(64), torch.zeros(64)
    first = kernel[(4,)](x, y, 64, BLOCK=16, num_warps=2)
    again = kernel[(5, 2)](y, x, 48, BLOCK=16, num_warps=2)
    assert len(compiled) == 1 and again is first
    grid, (stream, function, packed), hooks, *values = (
        launches[0][:3], launches[0][3:6], launches[0][6:9], *launches[0][9:]
    )  # fmt: skip
    assert grid == (5, 2, 1) and (stream, function, packed) == (77, 5, "packed")
    assert hooks == (None, None, None)
    assert values == [y.data_ptr(), x.data_ptr(), 48, 16]


def test_what_triton_specializes_on_is_another_kind(launches: list[tuple[Any, ...]]) -> None:
    compiled: list[Any] = []
    kernel = kernel_that_notes(launches, compiled)
    x, y = torch.zeros(64), torch.zeros(64)
    for args, options in (
        ((x, y, 64), {"BLOCK": 16, "num_warps": 2}),
        ((x[1:], y, 64), {"BLOCK": 16, "num_warps": 2}),  # an address that is not aligned
        ((x.half(), y, 64), {"BLOCK": 16, "num_warps": 2}),
        ((x, y, 1), {"BLOCK": 16, "num_warps": 2}),
        ((x, y, 64), {"BLOCK": 32, "num_warps": 2}),
        ((x, y, 64), {"BLOCK": 16, "num_warps": 4}),
    ):
        kernel[(1,)](*args, **options)
    assert len(compiled) == 6 and not launches


def test_tritons_own_launch_has_the_parts_that_are_used() -> None:
    """Names that another version of Triton may give other meanings."""
    source = triton.runtime.jit.JITFunction.run
    names = source.__code__.co_names + source.__code__.co_varnames
    for name in ("device_caches", "binder", "bound_args", "specialization", "packed_metadata"):
        assert name in names, name
