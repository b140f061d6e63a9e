"""Completions: an operation was made when its step has committed and none in flight failed."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.kv.completions import Completions


@given(
    steps=st.lists(st.integers(0, 6), max_size=12).map(sorted),
    failing=st.sets(st.integers(0, 6)),
)
def test_each_is_told_once_and_fails_with_any_step_in_flight_that_does(steps, failing):
    completions, told = Completions(), dict[int, bool]()

    def tell(number: int, is_made: bool) -> None:
        assert number not in told
        told[number] = is_made

    for number, step in enumerate(steps):
        completions.add(step, partial(tell, number))
    for committed in range(7):
        completions.settle(committed, committed in failing)
        first_failed = min((f for f in failing if f <= committed), default=99)
        for number, step in enumerate(steps):
            if first_failed <= step:  # all were in flight when it failed
                assert told[number] is False
            else:
                assert told.get(number) is (True if step <= committed else None)


def test_a_step_that_failed_takes_nothing_that_is_asked_later():
    completions, told = Completions(), list[bool]()
    completions.settle(0, failed=True)
    completions.add(1, told.append)
    completions.settle(1, failed=False)
    assert told == [True]


def test_operations_come_in_the_order_of_their_steps():
    completions = Completions()
    completions.add(3, print)
    with pytest.raises(AssertionError):
        completions.add(2, print)
