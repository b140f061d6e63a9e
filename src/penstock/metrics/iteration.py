"""Iteration statistics: kept for a while, listed in the names of TensorRT-LLM's `/metrics`."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from penstock.types.stats import IterationStats

MAX_KEPT = 1000


class IterationLog:
    """The newest iterations not yet asked for. `observe` sees each one once, whoever asks first.

    `shown` is the iteration before which all have been listed, by us or by another process that
    answers the same question; `show` writes it.
    """

    def __init__(
        self,
        drain: Callable[[], Iterable[IterationStats]],
        observe: Callable[[IterationStats], None],
        max_kept: int = MAX_KEPT,
        shown: Callable[[], int] = lambda: 0,
        show: Callable[[int], None] = lambda until: None,
    ) -> None:
        self._drain = drain
        self._observe = observe
        self._shown = shown
        self._show = show
        self._kept: deque[IterationStats] = deque(maxlen=max_kept)

    def refresh(self) -> None:
        for stats in self._drain():
            self._observe(stats)
            self._kept.append(stats)

    def take(self) -> list[dict[str, Any]]:
        """Every iteration since the last call, oldest first, at most `max_kept`."""
        self.refresh()
        shown = self._shown()
        taken = [stats for stats in self._kept if stats.iter >= shown]
        self._kept.clear()
        if taken:
            self._show(taken[-1].iter + 1)
        return [as_trtllm(stats) for stats in taken]


def as_trtllm(stats: IterationStats) -> dict[str, Any]:
    looked_up = stats.reused_blocks + stats.missed_blocks
    listed = {
        "timestamp": stats.timestamp,
        "iter": stats.iter,
        "iterLatencyMS": stats.latency_ms,
        "numActiveRequests": stats.num_active,
        "numQueuedRequests": stats.num_queued,
        "gpuMemUsage": stats.gpu_mem_bytes,
        "kvCacheStats": {
            "allocNewBlocks": stats.new_blocks,
            "allocTotalBlocks": stats.new_blocks + stats.reused_blocks,
            "cacheHitRate": stats.reused_blocks / looked_up if looked_up else 0.0,
            "freeNumBlocks": stats.free_blocks,
            "maxNumBlocks": stats.max_blocks,
            "missedBlocks": stats.missed_blocks,
            "reusedBlocks": stats.reused_blocks,
            "tokensPerBlock": stats.tokens_per_block,
            "usedNumBlocks": stats.used_blocks,
        },
        "inflightBatchingStats": {
            "numScheduledRequests": stats.num_scheduled,
            "numContextRequests": stats.num_context,
            "numGenRequests": stats.num_generation,
            "numCtxTokens": stats.num_context_tokens,
        },
        "stepKind": stats.kind,
        "ranAs": stats.ran_as,
    }
    if stats.num_drafting:
        listed["specDecodingStats"] = {
            "numDraftTokens": stats.num_drafted,
            "numAcceptedTokens": stats.num_accepted,
            "numRequestsWithDraftTokens": stats.num_drafting,
            "acceptanceLength": 1 + stats.num_accepted / stats.num_drafting,
        }
    return listed
