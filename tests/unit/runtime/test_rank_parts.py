"""Plans of several data-parallel ranks, taken apart and put together again."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.rank_parts import join_results, split_late, split_plan
from penstock.types.sampling import SamplingParams
from penstock.types.step import (
    FROM_DEVICE,
    BlockGrowth,
    CopyBlock,
    LateInputs,
    LogprobRows,
    RanAs,
    RowJoin,
    StepPlan,
    StepResult,
)

NUM_RANKS = 3


def ints(values) -> np.ndarray:
    return np.array(list(values), np.int32)


def a_plan(decodes, chunks) -> StepPlan:
    """Of (rank, tokens) each; every second chunk is a middle one."""
    entries = [*decodes, *chunks]
    ranks, num_tokens = ints(r for r, _ in entries), ints(n for _, n in entries)
    rows, num_decodes = ints(range(len(entries))), len(decodes)
    is_last = ints(i % 2 for i in range(len(chunks)))
    return StepPlan(
        step_id=7,
        joins=tuple(
            RowJoin(
                request_id=row, dp_rank=rank, row=row, token_ids=ints([1]), num_computed=0,
                num_prompt=1, sampling=SamplingParams(), stop_ids=(),
            )
            for row, (rank, _) in enumerate(entries)
        ),
        growth=BlockGrowth(
            dp_ranks=ranks, groups=ranks * 0, rows=rows, indices=rows, block_ids=rows + 1
        ),
        cache_ops=tuple(CopyBlock(dp_rank=r, group=0, src=1, dst=2) for r in ranks.tolist()),
        dp_ranks=ranks,
        rows=rows,
        starts=np.append(np.full(num_decodes, FROM_DEVICE, np.int32), is_last),
        num_tokens=num_tokens,
        num_logit_rows=np.append(num_tokens[:num_decodes], is_last).astype(np.int32),
        max_kv_lens=num_tokens,
        num_decodes=num_decodes,
        needs_late_inputs=True,
    )  # fmt: skip


ENTRIES = st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), st.integers(1, 3)), max_size=6)
PLANS = st.builds(a_plan, ENTRIES, ENTRIES).filter(lambda plan: plan.num_entries > 0)


@settings(max_examples=40, deadline=None)
@given(PLANS)
def test_each_rank_gets_its_own_and_all_know_each_others_tokens(plan):
    parts = split_plan(plan, NUM_RANKS)
    assert sorted(i for part in parts for i in part.entries) == list(range(plan.num_entries))
    for rank, part in enumerate(parts):
        own = part.plan
        assert set(own.dp_ranks.tolist()) <= {rank}
        assert own.rows.tolist() == own.growth.rows.tolist() == [j.row for j in own.joins]
        assert len(own.cache_ops) == own.num_entries
        assert (own.starts[: own.num_decodes] == FROM_DEVICE).all()
        assert (own.starts[own.num_decodes :] != FROM_DEVICE).all()
        assert own.peers.num_tokens[rank] == max(1, own.num_tokens.sum())
    assert len({part.plan.peers for part in parts}) == 1
    most = parts[0].plan.load
    own = [replace(part.plan, peers=None).load for part in parts]
    for name in ("num_decodes", "num_chunks", "num_prompt_tokens", "longest_prefix", "is_eager"):
        assert getattr(most, name) == max(getattr(load, name) for load in own)
    assert most.is_eager == plan.has_drafts and split_plan(plan, 3, True)[0].plan.load.is_eager


@settings(max_examples=40, deadline=None)
@given(PLANS, st.data())
def test_late_inputs_reach_the_rank_of_their_row(plan, data):
    num_logit_rows = int(plan.num_logit_rows.sum())
    rows = st.integers(0, max(0, num_logit_rows - 1))
    asked = sorted(data.draw(st.sets(rows, max_size=num_logit_rows)))
    late = LateInputs(positions=ints(asked), bitmasks=ints(asked).reshape(-1, 1))
    parts = split_plan(plan, NUM_RANKS)
    entry_of = np.repeat(np.arange(plan.num_entries), plan.num_logit_rows)
    found = {}
    for part, own in zip(parts, split_late(plan, parts, late), strict=True):
        entries = np.repeat(part.entries, part.plan.num_logit_rows)
        for position, (global_row,) in zip(own.positions, own.bitmasks, strict=True):
            found[int(global_row)] = int(entries[position])
    assert found == {row: entry_of[row] for row in asked}


@settings(max_examples=40, deadline=None)
@given(PLANS, st.booleans())
def test_results_come_back_to_their_entries(plan, has_drafts):
    parts = split_plan(plan, NUM_RANKS)
    none = np.zeros((0, 0), np.float32)

    def found(part):
        """Entry i of the whole plan has token 10 i and drafts i."""
        width = int(part.plan.num_logit_rows.max(initial=1))
        entries = part.entries.astype(np.int32)
        rows = {
            at: LogprobRows(
                token_ids=ints([entry]), logprobs=none, ranks=ints([]), top_ids=none,
                top_logprobs=none,
            )
            for at, entry in enumerate(entries.tolist())
        }  # fmt: skip
        return StepResult(
            step_id=7,
            token_ids=np.repeat(entries[:, None] * 10, width, 1),
            num_accepted=np.minimum(part.plan.num_logit_rows, 1),
            logprobs=rows,
            prompt_logprobs={},
            pooled={at: np.float32([entry]) for at, entry in enumerate(entries.tolist())},
            draft_ids=np.stack((entries, -entries), 1) if has_drafts else None,
            failures={at: str(entry) for at, entry in enumerate(entries.tolist())},
            ran_as=RanAs.GRAPH if len(entries) else RanAs.EAGER,
        )

    joined = join_results(plan, parts, [found(part) for part in parts])
    entries = list(range(plan.num_entries))
    assert joined.token_ids[:, 0].tolist() == [10 * i for i in entries]
    assert joined.num_accepted.tolist() == np.minimum(plan.num_logit_rows, 1).tolist()
    assert {i: rows.token_ids.tolist() for i, rows in joined.logprobs.items()} == {
        i: [i] for i in entries
    }
    assert {i: vector.tolist() for i, vector in joined.pooled.items()} == {i: [i] for i in entries}
    assert joined.failures == {i: str(i) for i in entries} and joined.error is None
    if has_drafts:
        assert joined.draft_ids.tolist() == [[i, -i] for i in entries]
    else:
        assert joined.draft_ids is None
    is_slow = any(not len(part.entries) for part in parts)
    assert joined.ran_as is (RanAs.EAGER if is_slow else RanAs.GRAPH)
