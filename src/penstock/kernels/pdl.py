"""Programmatic dependent launch: a kernel may start while the previous kernel still runs.

Hopper and later. Every kernel launched with `launch_options` calls `wait_for_previous` before it
reads what another kernel wrote or writes what another may still read; until then it may only touch
weights, and what was written before the first such kernel of the step. All of them must wait: a
kernel that ended without waiting would tell its successor that everything before is finished. One
that lets the next start only after its own wait lets it read what was finished by then.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from penstock.kernels.device import probe

_MIN_ARCH = 90


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_wait()


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keywords of a launch that works on `x`: the kernel's PDL and the launcher's."""
    if x.is_cuda and probe().arch >= _MIN_ARCH:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
