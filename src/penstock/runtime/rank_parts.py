"""A step of several data-parallel ranks: each rank's part of the plan, and one result of all parts.

Every rank runs every step, if only a padding token: MLPs need all ranks at once. What each of them
runs is known from the plan, so ranks agree on sizes without asking each other.
"""

# N entries of the plan, L logit rows

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.types.step import (
    BlockGrowth,
    Int32s,
    LateInputs,
    PeerLoads,
    RanAs,
    StepLoad,
    StepPlan,
    StepResult,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankPart:
    entries: NDArray[np.int64]  # of the whole plan
    plan: StepPlan


def split_plan(plan: StepPlan, num_ranks: int, is_eager: bool = False) -> list[RankPart]:
    """Each rank's own entries in their order, joins, growth and cache operations.

    `is_eager`: no rank may replay a graph.
    """
    if num_ranks == 1:
        return [RankPart(np.arange(plan.num_entries), plan)]
    own = [np.flatnonzero(plan.dp_ranks == rank) for rank in range(num_ranks)]
    parts = [_part(plan, rank, entries) for rank, entries in enumerate(own)]
    loads = [part.load for part in parts]
    peers = PeerLoads(
        num_tokens=tuple(max(1, int(part.num_tokens.sum())) for part in parts),
        num_sampling=tuple(int((part.num_logit_rows > 0).sum()) for part in parts),
        most=StepLoad(
            num_decodes=max(load.num_decodes for load in loads),
            num_chunks=max(load.num_chunks for load in loads),
            num_prompt_tokens=max(load.num_prompt_tokens for load in loads),
            longest_prefix=max(load.longest_prefix for load in loads),
            is_eager=is_eager or any(load.is_eager for load in loads),
        ),
    )
    return [
        RankPart(entries, replace(part, peers=peers))
        for entries, part in zip(own, parts, strict=True)
    ]


def _part(plan: StepPlan, rank: int, entries: NDArray[np.int64]) -> StepPlan:
    growth, grows = plan.growth, plan.growth.dp_ranks == rank
    num_decodes = int((entries < plan.num_decodes).sum())
    return replace(
        plan,
        joins=tuple(join for join in plan.joins if join.dp_rank == rank),
        growth=BlockGrowth(
            dp_ranks=growth.dp_ranks[grows],
            groups=growth.groups[grows],
            rows=growth.rows[grows],
            indices=growth.indices[grows],
            block_ids=growth.block_ids[grows],
        ),
        cache_ops=tuple(op for op in plan.cache_ops if op.dp_rank == rank),
        dp_ranks=plan.dp_ranks[entries],
        rows=plan.rows[entries],
        starts=plan.starts[entries],
        num_tokens=plan.num_tokens[entries],
        num_logit_rows=plan.num_logit_rows[entries],
        max_kv_lens=plan.max_kv_lens[entries],
        num_decodes=num_decodes,
        decode_tokens=None
        if plan.decode_tokens is None
        else plan.decode_tokens[entries[:num_decodes]],
    )


def split_late(plan: StepPlan, parts: Sequence[RankPart], late: LateInputs) -> list[LateInputs]:
    """Each rank's rows of logits are numbered from 0."""
    if not len(late.positions):
        return [late] * len(parts)
    entries_L = np.repeat(np.arange(plan.num_entries), plan.num_logit_rows)
    split = []
    for part in parts:
        is_own_L = np.isin(entries_L, part.entries)
        own_numbers_L = (np.cumsum(is_own_L) - 1).astype(np.int32)
        asked = is_own_L[late.positions]
        split.append(
            LateInputs(
                positions=own_numbers_L[late.positions[asked]], bitmasks=late.bitmasks[asked]
            )
        )
    return split


def join_results(
    plan: StepPlan, parts: Sequence[RankPart], results: Sequence[StepResult]
) -> StepResult:
    width = max(result.token_ids.shape[1] for result in results)
    token_ids = np.zeros((plan.num_entries, width), np.int32)
    num_accepted = np.zeros(plan.num_entries, np.int32)
    for part, result in zip(parts, results, strict=True):
        token_ids[part.entries, : result.token_ids.shape[1]] = result.token_ids
        num_accepted[part.entries] = result.num_accepted

    def by_entry(field: Callable[[StepResult], dict[int, T]]) -> dict[int, T]:
        return {
            int(part.entries[at]): value
            for part, result in zip(parts, results, strict=True)
            for at, value in field(result).items()
        }

    return StepResult(
        step_id=plan.step_id,
        token_ids=token_ids,
        num_accepted=num_accepted,
        logprobs=by_entry(lambda result: result.logprobs),
        prompt_logprobs=by_entry(lambda result: result.prompt_logprobs),
        pooled=by_entry(lambda result: result.pooled),
        draft_ids=_draft_ids(plan, parts, results),
        error=next((result.error for result in results if result.error is not None), None),
        failures=by_entry(lambda result: result.failures),
        ran_as=_ran_as(results),
    )


def _draft_ids(
    plan: StepPlan, parts: Sequence[RankPart], results: Sequence[StepResult]
) -> Int32s | None:
    found = [
        (part.entries, result.draft_ids)
        for part, result in zip(parts, results, strict=True)
        if result.draft_ids is not None
    ]
    if not found:
        return None
    draft_ids = np.full((plan.num_entries, found[0][1].shape[1]), -1, np.int32)
    for entries, own in found:
        draft_ids[entries] = own
    return draft_ids


def _ran_as(results: Sequence[StepResult]) -> RanAs:
    """A step is as slow as its slowest part."""
    ways = {result.ran_as for result in results}
    return RanAs.EAGER if RanAs.EAGER in ways else results[0].ran_as
