"""How many tokens are drafted: never more than pays by what steps cost and what was accepted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drafts import DraftsPerDecode
from penstock.runtime.profile_steps import decodes_of
from penstock.types.step import StepResult
from penstock.types.step_costs import StepCosts

MOST = 3
# One decode: a step takes as long with drafts. 256: each token takes its time.
COSTS = StepCosts(
    max_drafts=MOST,
    decodes=(1, 16, 256),
    plain=(1.0, 1.1, 2.0),
    drafting=(1.05, 1.2, 2.3),
    full=(1.1, 1.6, 8.2),
)


def ended(num_decodes: int, num_drafts: int, num_right: list[int]):
    plan = decodes_of(np.arange(num_decodes, dtype=np.int32), 1 + num_drafts, MOST, 64)
    accepted = 1 + np.array(num_right, np.int32)
    none = np.zeros((num_decodes, 1 + num_drafts), np.int32)
    result = StepResult(
        step_id=0, token_ids=none, num_accepted=accepted, logprobs={}, prompt_logprobs={}
    )
    return plan, result


def test_a_lone_decode_drafts_all_it_can_and_a_large_batch_nothing():
    lengths = DraftsPerDecode(MOST, np.inf, COSTS)
    assert lengths.most(1) == MOST
    assert lengths.most(256) == 0


def test_without_costs_the_length_is_fixed_up_to_max_concurrency():
    lengths = DraftsPerDecode(MOST, 4, None)
    for _ in range(50):
        lengths.observe(*ended(4, MOST, [0] * 4))
    assert lengths.most(4) == MOST and lengths.most(5) == 0


def test_wrong_drafts_end_drafting_but_for_probes_and_right_ones_bring_it_back():
    lengths = DraftsPerDecode(MOST, np.inf, COSTS)
    for _ in range(100):
        lengths.observe(*ended(8, MOST, [0] * 8))
    seen = [lengths.most(8) for _ in range(256)]
    assert set(seen) == {0, 1} and sum(seen) == 6
    for _ in range(100):
        lengths.observe(*ended(8, 1, [1] * 8))
    assert lengths.most(8) >= 1


def test_only_the_places_that_are_right_are_drafted():
    lengths = DraftsPerDecode(MOST, np.inf, COSTS)
    for _ in range(100):
        lengths.observe(*ended(16, MOST, [1] * 16))
    assert lengths.most(16) == 1


@given(
    rights=st.lists(st.lists(st.integers(0, MOST), min_size=4, max_size=4), max_size=30),
    steps=st.lists(st.floats(0.1, 10.0), min_size=9, max_size=9),
    num_decodes=st.integers(1, 2000),
)
def test_what_is_chosen_is_expected_to_be_no_slower(rights, steps, num_decodes):
    plain, drafting, full = steps[:3], steps[3:6], steps[6:]
    costs = StepCosts(
        max_drafts=MOST, decodes=(1, 16, 256), plain=tuple(plain), drafting=tuple(drafting),
        full=tuple(full),
    )  # fmt: skip
    lengths = DraftsPerDecode(MOST, np.inf, costs)
    for right in rights:
        lengths.observe(*ended(4, MOST, right))
    chosen = lengths.most(num_decodes)
    num_tokens = 1 + sum(np.prod(lengths._right[:k]) for k in range(1, chosen + 1))
    rate = num_tokens / costs.seconds(num_decodes, chosen)
    assert rate >= 1 / costs.seconds(num_decodes, 0) - 1e-9


def test_costs_lie_on_lines_between_what_was_measured():
    assert COSTS.seconds(1, 0) == 1.0 and COSTS.seconds(16, MOST) == pytest.approx(1.6)
    assert COSTS.seconds(136, 0) == pytest.approx(1.55)
    assert COSTS.seconds(496, 0) == pytest.approx(2.9)
    assert COSTS.seconds(1, 1) == pytest.approx(1.0 + 0.1 / 3)
    one = StepCosts(max_drafts=1, decodes=(1,), plain=(1.0,), drafting=(1.5,), full=(2.0,))
    assert one.seconds(64, 1) == 2.0
