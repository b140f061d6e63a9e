"""One iteration's figures, of the plan and the counters after its commit; and how it is counted."""

import time

from penstock.config.run import RunConfig
from penstock.types.stats import EngineCounters, IterationStats
from penstock.types.step import RanAs, StepPlan, StepResult


def count_step(counters: EngineCounters, plan: StepPlan, result: StepResult) -> None:
    """By its kind and how it ran; one that failed has not run."""
    if result.error is not None:
        return
    counters.graph_replays += result.ran_as is RanAs.GRAPH
    name = f"{plan.kind}_{result.ran_as}_steps"
    setattr(counters, name, getattr(counters, name) + 1)


def describe_step(
    plan: StepPlan,
    result: StepResult,
    counters: EngineCounters,
    config: RunConfig,
    seconds: float,
    device_bytes: int,
    num_accepted: int,
) -> IterationStats:
    num_context = plan.num_entries - plan.num_decodes
    num_drafts = plan.num_tokens[: plan.num_decodes] - 1
    num_reused = sum(join.num_computed // config.tokens_per_block for join in plan.joins)
    return IterationStats(
        iter=plan.step_id,
        timestamp=time.time(),
        latency_ms=seconds * 1e3,
        num_active=counters.running,
        num_queued=counters.waiting,
        num_scheduled=plan.num_entries,
        num_context=num_context,
        num_generation=plan.num_decodes,
        num_context_tokens=int(plan.num_tokens[plan.num_decodes :].sum()),
        used_blocks=counters.used_blocks,
        free_blocks=counters.total_blocks - counters.used_blocks,
        max_blocks=counters.total_blocks,
        tokens_per_block=config.tokens_per_block,
        new_blocks=len(plan.growth.rows) - num_reused,
        reused_blocks=num_reused,
        missed_blocks=len(plan.growth.rows) - num_reused,
        gpu_mem_bytes=device_bytes,
        num_drafting=int((num_drafts > 0).sum()),
        num_drafted=int(num_drafts.sum()),
        num_accepted=num_accepted,
        kind=plan.kind,
        ran_as=result.ran_as,
    )
