"""How many tokens are drafted: never more than pays by what steps cost and what was accepted."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drafts import _PRIOR, DraftsPerDecode
from penstock.runtime.profile_steps import decodes_of, first_tokens
from penstock.types.step import StepResult
from penstock.types.step_costs import StepCosts

MOST = 3
# One decode: a step takes as long with drafts. 256: each token takes its time.
COSTS = StepCosts(
    max_drafts=MOST,
    decodes=(1, 16, 256),
    plain=(1.0, 1.1, 2.0),
    keeping_up=(1.02, 1.15, 2.1),
    drafting=(1.05, 1.2, 2.3),
    single=(1.06, 1.3, 2.4),
    full=(1.1, 1.6, 8.2),
)
ROWS = 512


@dataclass
class Decode:
    """What `DraftsPerDecode` reads of a sequence."""

    row: int
    id: int = 0
    epoch: int = 0
    dp_rank: int = 0


def decodes(num: int, id: int = 0) -> list[Decode]:
    return [Decode(row, id) for row in range(num)]


def lengths_of(costs=COSTS, max_decodes=np.inf) -> DraftsPerDecode:
    return DraftsPerDecode(MOST, max_decodes, costs, ROWS, 1)


def ended(num_decodes: int, num_drafts: int, num_right: list[int], is_followed=True):
    plan = decodes_of(np.arange(num_decodes, dtype=np.int32), 1 + num_drafts, MOST, 64)
    plan = replace(plan, is_followed=is_followed)
    accepted = 1 + np.array(num_right, np.int32)
    none = np.zeros((num_decodes, 1 + num_drafts), np.int32)
    result = StepResult(
        step_id=0, token_ids=none, num_accepted=accepted, logprobs={}, prompt_logprobs={}
    )
    return plan, result


def test_a_lone_decode_drafts_all_it_can_and_a_large_batch_nothing():
    lengths = lengths_of()
    assert lengths.of(decodes(1)) == ([MOST], MOST, True, True)
    assert lengths.of(decodes(256)).most == 0


def test_without_costs_the_length_is_fixed_up_to_max_concurrency():
    lengths = lengths_of(None, 4)
    for _ in range(50):
        lengths.observe(*ended(4, MOST, [0] * 4))
    assert lengths.of(decodes(4)) == ([MOST] * 4, MOST, True, True)
    assert lengths.of(decodes(5)) == ([0] * 5, 0, True, True)


def test_a_server_learns_within_some_tokens_that_drafts_are_wrong():
    """Its first guess, that most are right, soon counts for little."""
    costs = StepCosts(
        max_drafts=MOST, decodes=(1,), plain=(1.0,), keeping_up=(1.02,), drafting=(1.05,),
        single=(1.2,), full=(1.45,),
    )  # fmt: skip
    lengths = lengths_of(costs)
    vain = 0
    while most := lengths.of(decodes(1, id=vain)).most:
        lengths.observe(*ended(1, most, [0]))
        vain += 1
    assert vain <= 16


def test_where_drafts_are_wrong_the_drafter_rests_but_for_probes_and_right_ones_bring_it_back():
    lengths = lengths_of()
    for _ in range(100):
        lengths.observe(*ended(8, MOST, [0] * 8))
    seen = [lengths.of(decodes(8)) for _ in range(256)]
    assert {one.most for one in seen} == {0, 1} and 3 <= sum(one.most for one in seen) <= 9
    assert sum(one.is_followed for one in seen) < 40
    for _ in range(100):
        lengths.observe(*ended(8, 1, [1] * 8))
    assert lengths.of(decodes(8)).most >= 1


def test_only_sequences_that_the_drafter_has_followed_try_drafts():
    lengths = lengths_of()
    for _ in range(100):
        lengths.observe(*ended(8, MOST, [0] * 8))
    lengths.of(decodes(8))
    lengths.observe(*ended(8, 0, [0] * 8, is_followed=False))
    assert all(lengths.of(decodes(8)).most == 0 for _ in range(300))
    prompt = first_tokens(np.array([7], np.int32))
    lengths.observe(prompt, replace(ended(1, 0, [0])[1], step_id=1))
    one_is_new = [*decodes(7), Decode(row=7, id=1)]
    assert lengths.of(one_is_new) == ([0] * 7 + [1], 1, True, True)


def test_where_no_draft_could_pay_prompts_pass_the_drafter_by_until_there_are_decodes_enough():
    """From 16 decodes on a draft is cheap."""
    costs = replace(
        COSTS, plain=(1.0, 4.0, 60.0), keeping_up=(1.1, 4.1, 60.5), drafting=(2.5, 4.2, 61.0),
        single=(3.0, 4.3, 61.5), full=(5.0, 4.5, 70.0),
    )  # fmt: skip
    lengths = lengths_of(costs)
    assert lengths.of([]).takes_prompts  # who knows how many there will be
    for _ in range(500):
        chosen = lengths.of(decodes(2))
    assert chosen == ([0, 0], 0, False, False) == lengths.of([])._replace(each=[0, 0])
    plan, result = ended(2, 0, [0, 0], is_followed=False)
    lengths.observe(plan, result)
    assert lengths.of(decodes(16)).most == MOST and lengths.of([]).takes_prompts


def test_only_the_places_that_are_right_are_drafted():
    lengths = lengths_of()
    for _ in range(100):
        lengths.observe(*ended(16, MOST, [1] * 16))
    assert lengths.of(decodes(16)) == ([1] * 16, 1, True, True)


def test_each_sequence_has_a_length_of_its_own_and_a_new_one_begins_with_what_all_have():
    lengths = lengths_of()
    for _ in range(100):
        lengths.of(decodes(16))
        lengths.observe(*ended(16, MOST, [MOST, 0] * 8))
    each = lengths.of(decodes(16)).each
    assert each == [MOST, 0] * 8
    others = [Decode(row, id=1) for row in range(16)]
    assert len(set(lengths.of(others).each)) == 1


@given(
    rights=st.lists(st.lists(st.integers(0, MOST), min_size=4, max_size=4), max_size=30),
    steps=st.lists(st.floats(0.1, 10.0), min_size=15, max_size=15),
    num_decodes=st.integers(1, ROWS),
)
def test_what_is_chosen_is_expected_to_be_no_slower(rights, steps, num_decodes):
    plain, *others = (tuple(one) for one in np.sort(np.reshape(steps, (5, 3)), axis=0).tolist())
    keeping_up, drafting, single, full = others
    costs = StepCosts(
        max_drafts=MOST, decodes=(1, 16, 256), plain=plain, keeping_up=keeping_up,
        drafting=drafting, single=single, full=full,
    )  # fmt: skip
    lengths = lengths_of(costs)
    lengths.of(decodes(num_decodes))
    for right in rights:
        lengths.observe(*ended(4, MOST, right))
    each = np.array(lengths.of([*decodes(num_decodes - 1), Decode(num_decodes - 1, 1)]).each)
    own_NK = lengths._own_right_RK[:num_decodes] + _PRIOR * lengths._right_K
    kept_NK = (own_NK / (lengths._own_seen_RK[:num_decodes] + _PRIOR)).cumprod(1)
    num_tokens = num_decodes + (kept_NK * (np.arange(MOST) < each[:, None])).sum()
    plain_rate = num_decodes / costs.plain_seconds(num_decodes)
    if most := int(each.max()):
        fed = np.array([each.sum()])
        assert num_tokens / costs.seconds(num_decodes, most, fed)[0] >= plain_rate - 1e-9


def test_costs_lie_on_lines_between_what_was_measured():
    none, all_of_one = np.array([0]), np.array([MOST])
    assert COSTS.plain_seconds(1) == 1.0
    assert COSTS.seconds(16, MOST, 16 * all_of_one)[0] == pytest.approx(1.6)
    assert COSTS.plain_seconds(136) == pytest.approx(1.55)
    assert COSTS.plain_seconds(496) == pytest.approx(2.9)
    assert COSTS.seconds(1, 1, none)[0] == pytest.approx(1.02 + 0.03 / 3)
    assert COSTS.seconds(16, MOST, np.array([1]))[0] == pytest.approx(1.3)
    one = StepCosts(
        max_drafts=1, decodes=(1,), plain=(1.0,), keeping_up=(1.1,), drafting=(1.5,),
        single=(2.0,), full=(2.0,),
    )  # fmt: skip
    assert one.seconds(64, 1, np.array([64]))[0] == 2.0
