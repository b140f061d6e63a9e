"""A stretch of native calls, recorded once and run again from C: what a CUDA graph is on a GPU.

While it is recorded nothing is computed. New tensors get their memory from an arena, in which they
take the place of those that are gone, so that what an op writes is still in the cache when the next
one reads it. Every op must be native: with one of torch's, which is not recorded, there is no tape.
"""

import contextlib
import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.native.functions import MAX_ARGUMENTS, NUMBERS, arguments

_ALIGNMENT = 64
_FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class NotRecordable(Exception):
    """Which op is the reason."""


class Arena:
    """Memory for tensors of one device step after the other; only what is touched is taken."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = [(0, num_bytes)]  # (start, size), ascending

    def empty_like(self, other: Tensor) -> Tensor:
        """The tensor's place is free again when it and its views are gone."""
        size = -(-max(other.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        start = self._take(size)
        arena = self

        class Place(ctypes.c_char * size):  # type: ignore[misc]
            def __del__(self) -> None:
                arena._give(start, size)

        place = Place.from_address(self._address + start)
        return torch.frombuffer(place, dtype=other.dtype, count=other.numel()).view(other.shape)

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory, which the next tensor may take."""
        offset = tensor.data_ptr() - self._address
        whole = torch.frombuffer(self._memory, dtype=tensor.dtype, offset=offset)
        return whole[: tensor.numel()].view(tensor.shape)

    def _take(self, size: int) -> int:
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        raise NotRecordable(f"a tensor of {size} bytes, for which the arena has no room")

    def _give(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for at, room in sorted([*self._free, (start, size)]):
            if merged and sum(merged[-1]) == at:
                at, room = merged[-1][0], merged.pop()[1] + room
            merged.append((at, room))
        self._free = merged


class CpuGraph:
    """What `record` made."""

    def __init__(self, loaded: ctypes.CDLL, calls: list[list[int]], kept: object) -> None:
        self._calls = np.array(calls, np.int64)
        self._kept = kept  # whatever the calls point to
        self._run: Callable[[int, int], None] = loaded.run_calls

    def run(self) -> None:
        self._run(self._calls.ctypes.data, len(self._calls))


def record(
    loaded: ctypes.CDLL, arena: Arena, step: Callable[[], Tensor]
) -> tuple[CpuGraph, Tensor]:
    """The calls of `step`, and the tensor that it returns, which `run` fills.

    Tapes may share an arena: the result is there until the next of them runs.
    """
    calls: list[list[int]] = []
    with _intercepted(loaded, calls), _Allocation(arena):
        result = step()
    if not result.is_contiguous():
        raise NotRecordable("a result with gaps")
    return CpuGraph(loaded, calls, (arena, step)), arena.unowned(result)


class _Allocation(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to tell it to stay away: seconds of a first answer."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func not in _FACTORIES:
            raise NotRecordable(str(func))
        made = func(*args, **(kwargs or {}))
        if not made.is_contiguous():
            raise NotRecordable(f"{func} with gaps")
        return self._arena.empty_like(made)


@contextlib.contextmanager
def _intercepted(loaded: ctypes.CDLL, calls: list[list[int]]) -> Iterator[None]:
    """The library's functions note their calls instead of running."""

    def notes(name: str) -> Callable[..., None]:
        letters, padding = arguments(name), [0] * (MAX_ARGUMENTS - len(arguments(name)))

        def note(*values: Any) -> None:
            words = [_word(letter, v) for letter, v in zip(letters, values, strict=True)]
            calls.append([NUMBERS[name], *words, *padding])

        return note

    functions = {name: getattr(loaded, name) for name in NUMBERS}
    try:
        for name in functions:
            setattr(loaded, name, notes(name))
        yield
    finally:
        for name, function in functions.items():
            setattr(loaded, name, function)


def _word(letter: str, value: Any) -> int:
    if letter == "f":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)
