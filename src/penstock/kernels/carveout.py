"""How much of a multiprocessor's memory is shared memory; the rest caches what is read.

A kernel gets what as many programs of it as fit could use. A multiprocessor changes the division
only when nothing runs on it, so a kernel that asks for another than the kernel in front cannot
begin beside it. Products of several tokens have nearly all as shared memory, and the small kernels
between them, which need none, ask for the same: eight layers of Llama-8B in fp8 with 32 sequences
took 1038 instead of 1091 us on an H200. A product of one token reads through the cache; there the
small kernels ask for nothing, and attention for no more than it needs: 779 instead of 835 us.
"""

import ctypes
import functools
from typing import Any

_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_ALL = 100
AS_USUAL = -1  # the driver decides
_MAX_TOKENS = 512  # with more, kernels take so long that what is between them is nothing

_asked: dict[int, int] = {}
"""percent, by the driver's function"""


def beside_products(num_tokens: int) -> int:
    """What a small kernel between products of so many tokens asks for, in percent."""
    return _ALL if 1 < num_tokens <= _MAX_TOKENS else AS_USUAL


def divide(kernel: Any, percent: int) -> None:
    """The next launches of `kernel`, which a launch returned, ask for so much shared memory. Those
    in a captured graph keep asking for what they did."""
    if kernel is None:  # Triton's interpreter
        return
    if _asked.get(kernel.function, AS_USUAL) != percent:
        _asked[kernel.function] = percent
        _driver().cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _CARVEOUT, percent)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
