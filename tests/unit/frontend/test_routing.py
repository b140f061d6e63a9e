"""The router sends a prefix where it is cached, and lets no engine fall far behind another."""

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend import routing
from penstock.frontend.routing import Router
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

BLOCK = 16


def request(ids, keys=()):
    return Request(
        id=1, prompt_ids=np.array(ids, np.int32), sampling=SamplingParams(), max_tokens=1,
        cache_keys=keys,
    )  # fmt: skip


def conversation(number, length):
    return [1000 * number + i for i in range(length)]


def test_a_later_turn_goes_where_the_earlier_ones_went():
    router, loads = Router(BLOCK), {0: 0, 1: 0, 2: 0}
    first = {number: router.pick(loads, request(conversation(number, 40))) for number in range(9)}
    assert sorted(first.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for number, engine in first.items():
        assert router.pick(loads, request(conversation(number, 90))) == engine


def test_a_prefix_of_another_key_is_not_one():
    router = Router(BLOCK)
    assert router.pick({0: 0, 1: 0}, request(conversation(1, 40), ("alice",))) == 0
    assert router.pick({0: 0, 1: 0}, request(conversation(1, 40), ("bob",))) == 1
    assert router.pick({0: 1, 1: 0}, request(conversation(1, 80), ("alice",))) == 0


def test_the_longer_prefix_wins():
    router, loads = Router(BLOCK), {0: 0, 1: 0}
    text = conversation(1, 96)
    assert router.pick(loads, request(text[:32])) == 0
    assert router.pick({0: 9, 1: 0}, request(text)) == 1  # the first is busy
    assert router.pick(loads, request([*text, 5, 6])) == 1
    branch = [*text[:32], *conversation(7, 64)]  # both have its beginning
    assert router.pick(loads, request(branch)) == 0  # less was sent there


def test_a_busy_engine_gives_up_what_it_has():
    router = Router(BLOCK)
    system = conversation(1, 64)
    assert router.pick({0: 0, 1: 0}, request(system)) == 0
    assert router.pick({0: 4, 1: 0}, request(system)) == 0
    assert router.pick({0: 5, 1: 0}, request(system)) == 1
    assert router.pick({0: 125, 1: 100}, request([*system, *conversation(2, 64)])) in (0, 1)
    assert router.pick({0: 126, 1: 100}, request(conversation(3, 64))) == 1


def test_an_engine_that_was_started_again_has_nothing():
    router = Router(BLOCK)
    assert router.pick({0: 0, 1: 0}, request(conversation(1, 64))) == 0
    router.forget(0)
    assert router.pick({0: 1, 1: 0}, request(conversation(1, 64))) == 1


def test_api_servers_that_share_a_table_route_alike():
    table = array("d", bytes(8 * routing.NUM_CELLS))
    one, other = Router(BLOCK, table), Router(BLOCK, table)
    loads = {0: 0, 1: 0}
    chosen = [one.pick(loads, request(conversation(number, 40))) for number in range(6)]
    assert set(chosen) == {0, 1}
    again = [other.pick(loads, request(conversation(number, 90))) for number in range(6)]
    assert again == chosen
    other.forget(0)
    assert one.pick({0: 1, 1: 0}, request(conversation(chosen.index(0), 90))) == 1


def test_what_is_looked_at_is_bounded():
    assert len(list(Router(BLOCK)._prefixes(request([7] * (BLOCK * 1000))))) == 256


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 80)), max_size=60),
    num_engines=st.integers(1, 4),
    ends=st.randoms(use_true_random=False),
)
def test_no_engine_is_ahead_by_more_than_the_slack(turns, num_engines, ends):
    router, loads = Router(BLOCK), dict.fromkeys(range(num_engines), 0)
    for number, length in turns:
        before = dict(loads)
        engine = router.pick(loads, request(conversation(number, length)))
        least = min(before.values())
        assert before[engine] <= least + max(4, least // 4)
        loads[engine] += 1
        done = ends.randrange(num_engines)
        if loads[done] and ends.random() < 0.4:
            loads[done] -= 1
