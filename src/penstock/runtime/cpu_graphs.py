"""`DecodeCpuGraphs`: steps of decodes on a CPU, recorded once per number of entries and run from C.

A step of a small model is some hundred short ops, and to call them from Python takes as long as
many of them do.
"""

# N entries, V vocabulary

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from penstock import log
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.native import library
from penstock.kernels.native.cpu_graph import Arena, CpuGraph, NotRecordable, record

_log = log.get(__name__)

_MAX_ENTRIES = 64  # with more of them the ops are long
_ARENA_BYTES = 1 << 28
_INPUTS = ("input_ids_T", "positions_T", "slots_T", "rows_N", "kv_lens_N")


@dataclass(slots=True)
class _Recorded:
    graph: CpuGraph
    batch: ForwardBatch
    result: Tensor


class DecodeCpuGraphs:
    """`step`: of a batch of decodes, which has at most `max_kv_len` of each."""

    def __init__(self, step: Callable[[ForwardBatch], Tensor], max_kv_len: int) -> None:
        self._step = step
        self._max_kv_len = max_kv_len
        self._library = library()
        self._arena = Arena(_ARENA_BYTES)
        self._recorded: dict[int, _Recorded] = {}
        self._is_recordable = self._library is not None

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """What the step gives, which the next call overwrites; None: it has to be computed."""
        is_long = batch.num_entries > _MAX_ENTRIES
        if not self._is_recordable or is_long or batch.has_fields:
            return None
        recorded = self._recorded.get(batch.num_entries) or self._record(batch)
        if recorded is None:
            return None
        for mine, theirs in zip(
            (recorded.batch, *recorded.batch.others), (batch, *batch.others), strict=True
        ):
            for name in _INPUTS:
                getattr(mine, name).copy_(getattr(theirs, name))
        recorded.graph.run()
        return recorded.result

    def _record(self, batch: ForwardBatch) -> _Recorded | None:
        own = self._own(batch)
        own.others = tuple(self._own(other) for other in batch.others)
        assert self._library is not None
        try:
            graph, result = record(self._library, self._arena, lambda: self._step(own))
        except NotRecordable as reason:
            _log.debug("decode steps run op by op: %s", reason)
            self._is_recordable = False
            return None
        recorded = _Recorded(graph, own, result)
        self._recorded[batch.num_entries] = recorded
        return recorded

    def _own(self, batch: ForwardBatch) -> ForwardBatch:
        """The same batch with inputs that stay where they are."""
        inputs = {name: getattr(batch, name).clone() for name in _INPUTS}
        return replace(batch, **inputs, max_kv_len=self._max_kv_len, plans={})
