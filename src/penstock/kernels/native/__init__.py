"""Ops written in C for the CPU: compiled on first use, kept in the cache folder, called by ctypes.

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


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions; None where they cannot be had, which is said once in the log."""
    try:
        return load(compiled())
    except (BuildError, OSError) as error:
        _log.warning("no native ops, torch's own are slower: %s", error)
        return None


def load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    declare(loaded)
    loaded.set_num_threads(torch.get_num_threads())
    return loaded


def set_coarse(is_coarse: bool) -> None:
    """Whether products with packed weights may take 16 bits of their inputs instead of 23."""
    if (loaded := library()) is not None:
        loaded.set_coarse(is_coarse)


def set_num_threads(count: int) -> None:
    """How many threads share the work of an op: as many as torch had when the library was loaded,
    unless said here."""
    if (loaded := library()) is not None:
        loaded.set_num_threads(count)
