"""Hopper-only kernels in Gluon: loaded on sm_90, left where this Triton cannot build them."""

import importlib
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from penstock import log
from penstock.kernels.device import probe

_log = log.get(__name__)
_HOPPER = 9  # sm_90


class HopperKernels:
    """A module of kernels in Gluon, the language below Triton's that every version changes."""

    def __init__(self, module: str, job: str) -> None:
        self._name, self._job = module, job
        self._module: ModuleType | None = None
        self._is_known = False

    def module(self, x: Tensor) -> ModuleType | None:
        """For `x`; None where that is not on a Hopper GPU, or after `give_up`."""
        if not x.is_cuda:
            return None
        if not self._is_known:
            self._is_known = True
            if probe().arch // 10 == _HOPPER:
                try:
                    self._module = importlib.import_module(self._name)
                except (ImportError, AttributeError) as error:
                    self.give_up(error)
        return self._module

    def result(self, name: str, x: Tensor, *args: Any) -> Tensor | None:
        """What the module's function gives; None where the fallback must compute."""
        if (kernels := self.module(x)) is None:
            return None
        try:
            y: Tensor = getattr(kernels, name)(x, *args)
            return y
        except Exception as error:  # of a lost device: the other kernel meets it again
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """A kernel could not be built, or launched: the module is not tried again. A step that ran
        out of memory says nothing of the kernel and fails as any other."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self._module = None
        what = " ".join(str(error).split())  # a compiler shows the source first, over many lines
        _log.warning(
            "%s by the slower kernel, as this Triton (%s) cannot build the one for Hopper: %s: %s",
            self._job, triton.__version__, type(error).__name__, what[-400:],
        )  # fmt: skip
