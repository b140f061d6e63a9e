"""`jit`: as `gluon.jit`, with the launches of `kernels.launch`."""

import functools
from collections.abc import Callable
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from penstock.kernels.launch import QuickLaunch


class GluonKernel(QuickLaunch, GluonJITFunction):  # type: ignore[type-arg]
    pass


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    return functools.partial(jit, **options) if fn is None else GluonKernel(fn, **options)
