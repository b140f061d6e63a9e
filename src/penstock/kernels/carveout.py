"""The shared-memory carveout: how much of an SM's L1 is shared memory; the rest is cache.

By default a kernel gets what its resident programs could use. An SM changes the carveout only when
nothing runs on it, so a kernel that asks for another one than the previous kernel cannot overlap
with it (PDL). GEMMs of several tokens have nearly all as shared memory, and the small kernels
between them, which need none, ask for the same: eight layers of Llama-8B in FP8 with 32 sequences
took 1038 instead of 1091 us on an H200. A GEMV reads through the L1; there the small kernels ask
for nothing, and attention for no more than it needs: 779 instead of 835 us.
"""

import ctypes
import functools
from typing import Any

_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_ALL = 100
DRIVER_DEFAULT = -1
_MAX_TOKENS = 512  # with more, kernels take so long that what is between them is nothing

_asked: dict[int, int] = {}
"""percent, by the driver's function"""


def between_gemms(num_tokens: int) -> int:
    """The carveout of a small kernel between GEMMs of so many tokens, in percent."""
    return _ALL if 1 < num_tokens <= _MAX_TOKENS else DRIVER_DEFAULT


def set_carveout(kernel: Any, percent: int) -> None:
    """The next launches of `kernel`, which a launch returned, ask for this carveout. Those in a
    captured graph keep theirs."""
    if kernel is None:  # Triton's interpreter
        return
    if _asked.get(kernel.function, DRIVER_DEFAULT) != percent:
        _asked[kernel.function] = percent
        _driver().cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _CARVEOUT, percent)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
