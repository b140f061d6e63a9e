"""`CudaGraphs`: decode steps captured once per batch size and replayed with row numbers alone."""

# N entries of a captured size, V vocabulary

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.types.step import Int32s

DecodeStep = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""rows_N -> (logits_NV, kv_lens_N, rows_N as int64)"""


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, Tensor, Tensor]


class CudaGraphs:
    """`step` must build everything it needs from `rows_N` on the device, and wait for nothing."""

    def __init__(
        self,
        step: DecodeStep,
        sizes: tuple[int, ...],
        may_pad: bool,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self._step = step
        self._sizes = np.array(sorted(sizes), np.int64)
        self._may_pad = may_pad
        self._padding_row = padding_row
        self._rows = torch.full((max(sizes),), padding_row, dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}
        self.num_replays = 0

    def capture(self, on_captured: Callable[[int], None]) -> None:
        """Largest first, so that the smaller ones live in the memory it took."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for size in self._sizes[::-1].tolist():
            rows_N = self._rows[:size]
            with torch.cuda.stream(stream):
                self._step(rows_N)  # compiles kernels and grows workspaces outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Thread-local: a collective's watchdog thread may ask for its events meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self._step(rows_N)
            self._captured[size] = _Captured(graph, outputs)
            on_captured(size)

    def fits(self, num_entries: int) -> bool:
        return self._padded(num_entries) is not None

    def replay(self, rows: Int32s) -> tuple[Tensor, Tensor, Tensor]:
        """The step's outputs for `rows`. The next replay overwrites them, in stream order."""
        size = self._padded(len(rows))
        assert size is not None
        padded = torch.full((size,), self._padding_row, dtype=torch.int32, pin_memory=True)
        padded[: len(rows)] = torch.from_numpy(rows)
        self._rows[:size].copy_(padded, non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        self.num_replays += 1
        logits_NV, kv_lens_N, rows_N = captured.outputs
        return logits_NV[: len(rows)], kv_lens_N[: len(rows)], rows_N[: len(rows)]

    def _padded(self, num_entries: int) -> int | None:
        at = int(np.searchsorted(self._sizes, num_entries))
        if at == len(self._sizes):
            return None
        size = int(self._sizes[at])
        return size if size == num_entries or self._may_pad else None
