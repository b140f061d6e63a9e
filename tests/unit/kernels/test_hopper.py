"""Where kernels for Hopper are loaded, and what happens where they cannot be built."""

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch

from penstock.kernels import hopper
from penstock.kernels.hopper import HopperKernels
from penstock.kernels.op import Needs
from penstock.kernels.op import hopper as needs_hopper

ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
NAME = "penstock.kernels.formats"  # any module


def on_arch(monkeypatch: pytest.MonkeyPatch, arch: int) -> HopperKernels:
    monkeypatch.setattr(hopper, "probe", lambda: SimpleNamespace(arch=arch))
    return HopperKernels(NAME, "sums are made")


@pytest.mark.parametrize(("arch", "is_hopper"), [(0, False), (80, False), (90, True), (100, False)])
def test_a_gpu_of_another_kind_never_loads_them(
    arch: int, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = on_arch(monkeypatch, arch)
    assert kernels.module(ON_CPU) is None
    assert (kernels.module(ON_GPU) is importlib.import_module(NAME)) == is_hopper
    monkeypatch.setattr("penstock.kernels.op.probe", lambda: SimpleNamespace(arch=arch))
    assert needs_hopper() == Needs("cuda", 90, 99)
    assert (needs_hopper().missing() is None) == is_hopper


@pytest.mark.parametrize("error", [ImportError("no gluon"), AttributeError("async_load")], ids=str)
def test_a_triton_without_their_language_is_reported_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise error

    kernels = on_arch(monkeypatch, 90)
    monkeypatch.setattr(hopper.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING):
        assert [kernels.module(ON_GPU) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert str(error) in record.getMessage() and "sums are made" in record.getMessage()


def test_what_was_given_up_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = on_arch(monkeypatch, 90)
    assert kernels.module(ON_GPU) is not None
    kernels.give_up(RuntimeError("no registers"))
    assert kernels.module(ON_GPU) is None


def test_want_of_memory_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = on_arch(monkeypatch, 90)
    assert kernels.module(ON_GPU) is not None
    with pytest.raises(torch.OutOfMemoryError):
        kernels.give_up(torch.OutOfMemoryError("2 GiB"))
    assert kernels.module(ON_GPU) is not None
