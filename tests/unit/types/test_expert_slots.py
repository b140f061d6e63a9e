"""Which slot holds which expert: every one somewhere, none twice on a rank, ranks equally busy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.types.expert_slots import (
    balanced_slots,
    check_num_slots,
    check_slots,
    first_slots,
    imbalance,
    rank_loads,
)


@given(st.data())
def test_any_load_gives_valid_slots_and_what_stays_keeps_its_slot(data):
    num_ranks, num_experts = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 40))
    per_rank = data.draw(st.integers(-(-num_experts // num_ranks), num_experts))
    loads = data.draw(st.lists(st.integers(0, 2000), min_size=num_experts, max_size=num_experts))
    first = first_slots(num_experts, num_ranks * per_rank, num_ranks)
    check_slots("first", first, num_experts, num_ranks)
    found = balanced_slots(loads, len(first), num_ranks, first)
    check_slots("found", found, num_experts, num_ranks)
    for rank in range(num_ranks):
        own = slice(rank * per_rank, (rank + 1) * per_rank)
        for before, after in zip(first[own], found[own], strict=True):
            assert before == after or before not in found[own]
    assert sum(rank_loads(loads, found, num_ranks)) == pytest.approx(sum(loads))


def test_a_load_as_skewed_as_real_ones_is_balanced():
    rng = random.Random(3)
    loads = [100_000 // (rank + 1) for rank in range(256)]
    rng.shuffle(loads)
    first = first_slots(256, 288, 32)
    assert imbalance(loads, first, 32) > 3
    assert imbalance(loads, balanced_slots(loads, 288, 32, first), 32) < 1.05
    few = balanced_slots(loads, 256, 32)  # none twice: the most wanted one bounds it
    assert imbalance(loads, few, 32) < 1.1 * max(loads) * 32 / sum(loads)


def test_without_load_nothing_is_unbalanced():
    assert imbalance([0] * 8, first_slots(8, 12, 4), 4) == 1.0


@pytest.mark.parametrize(
    ("num_slots", "message"),
    [
        (10, "is 10, which 4 expert-parallel ranks cannot share equally; use 12"),
        (4, "is 4, but there are 8 experts; use as many at least"),
        (36, "is 36, but 8 experts on each of 4 ranks are 32; use at most that"),
    ],
)
def test_numbers_of_slots_that_do_not_fit_are_refused(num_slots, message):
    with pytest.raises(ConfigError, match=message):
        check_num_slots(num_slots, 8, 4)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0, 0, 1, 2), r"has expert 0 2 times on rank 0 \(slots 0 to 1\)"),
        ((0, 1, 0, 1), "has no slot for expert 2"),
        ((0, 1, 2, 3), "names expert 3; there are 3"),
    ],
)
def test_slots_that_cannot_be_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        check_slots("layer 7", slots, 3, 2)
