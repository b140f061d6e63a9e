"""CUDA graphs: steps captured once per size and replayed with new inputs.

What a graph ends with are logits, or on a stage that is not the last one hidden states.

`DecodeGraphs` have a size per number of tokens, drafted ones included, and take row numbers alone
(and how far a drafted token is behind its row's last one). Where there are drafts, steps that
neither feed them nor tell a drafter have plain graphs of their own, which are those of a server
without drafts. Steps with prompts are in `mixed_graphs.py`.
"""

# N entries of a captured size, L of them with logits, V vocabulary

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.runtime.input_batch import Rows
from penstock.runtime.stage_link import StageLink
from penstock.types.step import Int32s

Accept = Callable[[Tensor], None]
"""Told how many tokens of each decode count, the sequences in the order of the step."""


class Outputs(NamedTuple):
    """On a stage that is not the last one hidden states of all tokens stand in the place of the
    logits. `accept`: where layers keep no token before they are told that it counts."""

    logits_NV: Tensor
    kv_lens_N: Tensor
    rows_N: Tensor  # int64
    hidden_TE: Tensor | None  # of all tokens, where a drafter reads them
    accept: Accept | None = None


GraphStep = Callable[[Tensor, bool], Outputs]
"""From `padding_inputs`, or from a step as `StepShape` packs it, and whether the batch has fields
of features; builds everything on the device and waits for nothing."""
T = TypeVar("T")


def padding_inputs(rows: Rows, size: int, is_plain: bool = False) -> Tensor:
    """Of a step of padding alone, from which one is captured: rows, and where graphs take drafts
    behind them how far each token is from its row's last one."""
    width = 1 if is_plain else rows.decode_width
    inputs = torch.zeros(size * width, dtype=torch.int32, device=rows.device)
    inputs[:size] = rows.padding_row
    return inputs


class GraphPool:
    """The memory that graphs share, which never run at the same time, and the stream of captures.

    Capture the largest first, so that the smaller ones live in the memory it took.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(
        self,
        step: GraphStep,
        inputs: Tensor,
        has_fields: bool,
        warmup: AbstractContextManager[None] | None = None,
    ) -> "Captured":
        """`warmup`: what to run the step in once before, where that may be less than all of it."""

        def run() -> Outputs:
            outputs = step(inputs, has_fields)
            if outputs.accept is not None:
                outputs.accept(torch.ones_like(outputs.rows_N))
            return outputs

        self._warm_up(run, warmup)
        graph, outputs = self._record(lambda: step(inputs, has_fields))
        hidden_TE, accept = outputs.hidden_TE, outputs.accept
        if hidden_TE is not None:
            hidden_TE = _borrowed(hidden_TE)
        if accept is not None:
            accept = self._accept(accept, torch.ones_like(outputs.rows_N))
        logits_NV = _borrowed(outputs.logits_NV)
        outputs = outputs._replace(logits_NV=logits_NV, hidden_TE=hidden_TE, accept=accept)
        return Captured(graph, inputs, outputs)

    def _accept(self, accept: Accept, counts_N: Tensor) -> Accept:
        """Captured before the memory of what the step has kept goes to another graph."""
        graph, _ = self._record(lambda: accept(counts_N))

        def replay(num_accepted_N: Tensor) -> None:
            counts_N[: len(num_accepted_N)].copy_(num_accepted_N)
            graph.replay()

        return replay

    def capture_call(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
    ) -> "CapturedCall":
        """The same of anything; inputs and outputs keep their memory."""
        self._warm_up(lambda: run(*inputs), None)
        graph, outputs = self._record(lambda: run(*inputs))
        return CapturedCall(graph, inputs, outputs)

    def _warm_up(
        self, run: Callable[[], object], context: AbstractContextManager[None] | None
    ) -> None:
        """Compiles kernels and grows workspaces outside the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still write the inputs
        with torch.cuda.stream(self._stream), context or nullcontext():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a collective's watchdog thread may ask for its events meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = run()
        return graph, outputs


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
        """The next replay, of any graph of the pool, overwrites the logits and hidden states, in
        stream order."""
        self.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.outputs


@dataclass(slots=True)
class CapturedCall:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]  # the caller writes into them
    outputs: tuple[Tensor, ...]

    def replay(self) -> tuple[Tensor, ...]:
        self.graph.replay()
        return self.outputs


def captured_size(sizes: NDArray[np.int64], count: int, may_pad: bool) -> int | None:
    """The smallest of these ascending sizes that holds `count`; None: there is none."""
    at = int(np.searchsorted(sizes, count))
    if at == len(sizes) or (sizes[at] != count and not may_pad):
        return None
    return int(sizes[at])


class DecodeGraphs:
    def __init__(
        self,
        step: GraphStep,
        sizes: tuple[int, ...],
        may_pad: bool,
        rows: Rows,
        is_plain: bool = False,
    ) -> None:
        self._step = step
        self._is_plain = is_plain
        self._width = 1 if is_plain else rows.decode_width
        self._sizes = np.array(sorted(sizes), np.int64)
        self._may_pad = may_pad
        self._rows = rows
        self._captured: dict[tuple[int, bool], Captured] = {}  # by size, and whether with fields

    def capture(self, pool: GraphPool) -> None:
        for size in self._sizes[::-1].tolist():
            for has_fields in self._rows.graph_kinds:
                inputs = padding_inputs(self._rows, size, self._is_plain)
                self._captured[size, has_fields] = pool.capture(self._step, inputs, has_fields)

    def fits(self, num_entries: int) -> bool:
        return self._padded(num_entries) is not None

    @property
    def takes_drafts(self) -> bool:
        return self._width > 1

    def replay(
        self,
        link: StageLink,
        rows: Int32s,
        offsets: Int32s | None = None,
        num_entries: int | None = None,
    ) -> Outputs:
        """`offsets`: how far each token is behind its row's last one; None: not at all.
        `num_entries`: of the rank with most, all ranks replay the same graph; None: as many."""
        size = self._padded(len(rows) if num_entries is None else num_entries)
        assert size is not None and len(rows) <= size, (len(rows), size)
        padded = np.zeros((self._width, size), np.int32)
        padded[0] = self._rows.padding_row
        padded[0, : len(rows)] = rows
        if offsets is not None:
            padded[1, : len(rows)] = offsets
        captured = self._captured[size, self._rows.want_fields(rows)]
        own = [slice(0, max(1, len(rows)))]  # without rows a token of padding stands for them
        link.receive_padded(own, size)
        outputs = captured.replay(padded.reshape(-1))
        link.send_padded(outputs.logits_NV, own)
        count, hidden_TE = len(rows), outputs.hidden_TE
        return Outputs(
            outputs.logits_NV[:count],
            outputs.kv_lens_N[:count],
            outputs.rows_N[:count],
            None if hidden_TE is None else hidden_TE[:count],
            outputs.accept,
        )

    def _padded(self, num_entries: int) -> int | None:
        return captured_size(self._sizes, num_entries, self._may_pad)
