"""CUDA graphs: steps captured once per size and replayed with new inputs.

`DecodeGraphs` have a size per number of sequences and take row numbers alone. Steps with prompts
are in `mixed_graphs.py`.
"""

# N entries of a captured size, L of them with logits, V vocabulary

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.input_batch import Rows
from penstock.types.step import Int32s

Outputs = tuple[Tensor, Tensor, Tensor]
"""logits_NV, kv_lens_N, rows_N as int64"""
GraphStep = Callable[[Tensor], Outputs]
"""From rows_N, or from a step as `StepShape` packs it; builds everything on the device and waits
for nothing."""


def decode_inputs(rows: Rows, size: int) -> Tensor:
    """Of a step of padding alone, from which one is captured."""
    return torch.full((size,), rows.padding_row, dtype=torch.int32, device=rows.device)


class GraphPool:
    """The memory that graphs share, which never run at the same time, and the stream of captures.

    Capture the largest first, so that the smaller ones live in the memory it took.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(
        self, step: GraphStep, inputs: Tensor, warmup: AbstractContextManager[None] | None = None
    ) -> "Captured":
        """`warmup`: what to run the step in once before, where that may be less than all of it."""
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still write the inputs
        with torch.cuda.stream(self._stream), warmup or nullcontext():
            step(inputs)  # compiles kernels and grows workspaces outside the capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a collective's watchdog thread may ask for its events meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits_NV, kv_lens_N, rows_N = step(inputs)
        return Captured(graph, inputs, (_borrowed(logits_NV), kv_lens_N, rows_N))


class _Memory:
    """Of a tensor, without owning it."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": f"<i{x.element_size()}",  # the interface knows no bfloat16
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def _borrowed(x: Tensor) -> Tensor:
    """What a graph writes there. The memory stays the pool's, so that the graph captured next may
    write there, too: logits of all sizes up to 1024 would take 3 GiB for a vocabulary of 128k."""
    assert x.is_contiguous(), x.stride()
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    outputs: Outputs

    def replay(self, inputs: Int32s) -> Outputs:
        """The next replay, of any graph of the pool, overwrites the logits, in stream order."""
        self.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.outputs


class DecodeGraphs:
    def __init__(self, step: GraphStep, sizes: tuple[int, ...], may_pad: bool, rows: Rows) -> None:
        self._step = step
        self._sizes = np.array(sorted(sizes), np.int64)
        self._may_pad = may_pad
        self._padding_row = rows.padding_row
        self._rows = decode_inputs(rows, max(sizes))
        self._captured: dict[int, Captured] = {}

    def capture(self, pool: GraphPool) -> None:
        for size in self._sizes[::-1].tolist():
            self._captured[size] = pool.capture(self._step, self._rows[:size])

    def fits(self, num_entries: int) -> bool:
        return self._padded(num_entries) is not None

    def replay(self, rows: Int32s) -> Outputs:
        size = self._padded(len(rows))
        assert size is not None
        padded = np.full(size, self._padding_row, np.int32)
        padded[: len(rows)] = rows
        logits_NV, kv_lens_N, rows_N = self._captured[size].replay(padded)
        return logits_NV[: len(rows)], kv_lens_N[: len(rows)], rows_N[: len(rows)]

    def _padded(self, num_entries: int) -> int | None:
        at = int(np.searchsorted(self._sizes, num_entries))
        if at == len(self._sizes):
            return None
        size = int(self._sizes[at])
        return size if size == num_entries or self._may_pad else None
