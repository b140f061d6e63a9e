"""Ops written in C for the CPU: compiled on first use and kept in the cache folder, or part of a
platform wheel; called by ctypes.

An implementation says `needs=native()` (`kernels/op.py`); where the sources cannot be compiled,
`library()` is None and the ops run as torch does them. The C files follow the compiler's vector
extensions, so one source serves AVX-512, AVX2 and NEON.
"""

import ctypes
import functools
from pathlib import Path

import torch

from penstock import log
from penstock.kernels.native.compiler import BuildError, compiled
from penstock.kernels.native.functions import declare

_log = log.get(__name__)
# SmolLM2-135M Q4_1, two threads of a shared machine: four requests at once, and one alone.
SLOWER = "3 to 10 times slower"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions; None where they cannot be had, which is said once in the log."""
    found = library_or_reason()
    if isinstance(found, ctypes.CDLL):
        return found
    _log.warning(
        "%s: native CPU ops are off, quantized models answer %s; install gcc or clang and start "
        "again, or install the platform wheel, which needs neither: 'make wheel' on a machine with "
        "gcc, then here 'pip install dist/penstock-*-manylinux*.whl'",
        *(found, SLOWER),
    )
    return None


def library_or_reason() -> ctypes.CDLL | str:
    """The functions, or why they cannot be had."""
    try:
        try:
            return load(compiled())
        except (OSError, AttributeError) as error:  # not loadable, or without a function
            _log.warning("native ops cannot be loaded and are compiled again: %s", error)
            return load(compiled(anew=True))
    except (BuildError, OSError, AttributeError) as error:
        return str(error)


def load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    declare(loaded)
    loaded.set_num_threads(torch.get_num_threads())
    return loaded


def set_coarse(is_coarse: bool) -> None:
    """Whether GEMMs with packed weights may take 16 bits of their inputs instead of 23."""
    if (loaded := library()) is not None:
        loaded.set_coarse(is_coarse)


def set_num_threads(count: int) -> None:
    """How many threads share the work of an op: as many as torch had when the library was loaded,
    unless said here."""
    if (loaded := library()) is not None:
        loaded.set_num_threads(count)
