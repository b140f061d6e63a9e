"""What the engine counts: totals since start, and one record per iteration."""

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since start (monotonic) and gauges of now."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, so without reused ones
    generated_tokens: int = 0
    decodes: int = 0  # of one sequence in one step
    drafted_tokens: int = 0  # that decodes fed beside the last token
    accepted_tokens: int = 0  # of the drafted ones
    known_tokens: int = 0  # of the generated ones: not drawn, since nothing else could come
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    swapped_out_blocks: int = 0  # to host memory, when their sequence was preempted
    swapped_in_blocks: int = 0  # and back
    max_steps_in_flight: int = 0
    graph_replays: int = 0
    # Steps by what they held and how they ran (`types.step.RanAs`).
    decode_graph_steps: int = 0
    decode_cpu_graph_steps: int = 0
    decode_eager_steps: int = 0
    prefill_graph_steps: int = 0
    prefill_eager_steps: int = 0
    mixed_graph_steps: int = 0
    mixed_eager_steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0  # free, but still holding a reusable prefix
    total_blocks: int = 0
    engines: int = 0  # that are up; each says 1 of itself


GAUGES = ("running", "waiting", "used_blocks", "cached_blocks", "total_blocks", "engines")


def added(several: Iterable[EngineCounters]) -> EngineCounters:
    """Of several engines, or of one that was started several times."""
    counters = list(several)
    return EngineCounters(
        **{
            field.name: sum(getattr(one, field.name) for one in counters)
            for field in fields(EngineCounters)
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStats:
    """One committed step, as `/metrics` lists it."""

    iter: int
    timestamp: float
    latency_ms: float
    num_active: int
    num_queued: int
    num_scheduled: int
    num_context: int
    num_generation: int
    num_context_tokens: int
    used_blocks: int
    free_blocks: int
    max_blocks: int
    tokens_per_block: int
    new_blocks: int
    reused_blocks: int
    missed_blocks: int
    gpu_mem_bytes: int
    num_drafting: int = 0  # decodes with drafted tokens
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # of these
    kind: str = "decode"  # "prefill", "mixed": both
    ran_as: str = "eager"  # `types.step.RanAs`
