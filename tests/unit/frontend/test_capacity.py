"""Places and tokens of the queue: what is kept for others, and what one request may take."""

import numpy as np
import pytest
from fake_engine import make_info, say
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CapacityError, RequestError
from penstock.frontend.capacity import Capacity, Holdings
from penstock.server.generations import Generations
from penstock.types.request import GenerateInput
from penstock.types.sampling import SamplingParams
from penstock.types.tenant import PROBE, Tenant


def tenants(*weights: float, **fields: object) -> list[Tenant]:
    return [Tenant(index=i, weight=weight, **fields) for i, weight in enumerate(weights)]


def fill(capacity: Capacity, info, index: int, num_tokens: int = 1, most: int = 10**6) -> int:
    """Open one request after the other until one is refused; how many were taken."""
    for num_taken in range(most):
        try:
            capacity.check_room(info, 1, index, 1, num_tokens)
        except CapacityError:
            return num_taken
        capacity.holdings.change(index, 1, num_tokens)
    return most


def test_a_key_over_its_share_is_refused_while_another_still_gets_places():
    info = make_info(max_queued=8192)
    capacity = Capacity(tenants(1.0, 3.0), reserved_share=0.125)
    assert fill(capacity, info, 0) == 8192 - 768  # three quarters of an eighth are the other's
    with pytest.raises(CapacityError, match=r"this key has 7424 requests open, more than"):
        capacity.check_room(info, 1, 0, 1, 1)
    assert fill(capacity, info, 1) == 768
    with pytest.raises(CapacityError, match=r"8192 requests are open and at most 8192 may be"):
        capacity.check_room(info, 1, 1, 1, 1)


def test_so_it_is_with_tokens():
    info = make_info(max_queued=8192, max_queued_tokens=100_000)
    capacity = Capacity(tenants(1.0, 1.0), reserved_share=0.2, bounds_tokens=True)
    assert fill(capacity, info, 0, num_tokens=1000) == 90
    with pytest.raises(CapacityError, match=r"90000 prompt tokens open.*max_queued_tokens"):
        capacity.check_room(info, 1, 0, 1, 1000)
    assert fill(capacity, info, 1, num_tokens=1000) == 10


def test_one_key_alone_may_take_everything():
    info = make_info(max_queued=50)
    assert fill(Capacity(tenants(1.0), reserved_share=0.5), info, 0) == 50


def test_limits_of_a_key_are_its_own():
    info = make_info(max_queued=50)
    capacity = Capacity(
        tenants(1.0, 1.0, max_queued_requests=5, max_queued_tokens=100), bounds_tokens=True
    )
    assert fill(capacity, info, 0, num_tokens=10) == 5
    assert fill(capacity, info, 1, num_tokens=40) == 2
    with pytest.raises(RequestError, match=r"6 requests asked, this key may have 5 open"):
        capacity.check_room(info, 1, 1, 6, 6)


def test_health_checks_have_places_when_all_others_are_taken():
    info = make_info(max_queued=3)
    capacity = Capacity()
    assert fill(capacity, info, 0) == 3
    assert fill(capacity, info, PROBE) == 16
    assert capacity.holdings.total().tolist() == [[3, 3], [16, 16]]


def test_one_request_may_take_a_share_of_the_queue():
    info = make_info(max_queued=8192, max_queued_tokens=40_000, max_seq_len=4096)
    capacity = Capacity(max_request_share=0.25, bounds_tokens=True)
    with pytest.raises(RequestError, match=r"8192 sequences, at most 2048 .*max_request_share"):
        capacity.check_request(info, 128, 64 * 128)
    capacity.check_request(info, 128, 2048, 10_000)
    with pytest.raises(RequestError, match=r"10001 prompt tokens.*at most 10000.*raise"):
        capacity.check_request(info, 1, 1, 10_001)


def test_one_prompt_as_long_as_may_be_is_never_too_much():
    info = make_info(max_queued_tokens=4 * 4096, max_seq_len=4096)
    Capacity(max_request_share=0.01, bounds_tokens=True).check_request(info, 1, 1, 4096)


def test_small_queues_do_not_forbid_samples():
    info = make_info(max_queued=32)
    Capacity(max_request_share=0.25).check_request(info, 32, 32)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=6),
    max_queued=st.integers(16, 300),
    share=st.floats(0.0, 1.0),
    order=st.lists(st.integers(0, 5), max_size=12),
)
def test_whoever_comes_last_finds_its_part(weights, max_queued, share, order):
    info = make_info(max_queued=max_queued)
    capacity = Capacity(tenants(*weights), reserved_share=share)
    for index in order:
        fill(capacity, info, index % len(weights))
    for index, weight in enumerate(weights):
        part = int(share * max_queued * weight / sum(weights) + 1e-9)
        fill(capacity, info, index)
        assert capacity.holdings.total()[index, 0] >= part - 1
    assert capacity.holdings.total()[:PROBE, 0].sum() <= max_queued


def test_front_ends_count_together_and_one_that_ends_is_forgotten():
    rows = [np.zeros(Holdings.num_cells(2)) for _ in range(3)]
    every = [Holdings(2, rows, own) for own in range(3)]
    for own, holdings in enumerate(every):
        holdings.change(1, own + 1, 100)
    assert every[0].total()[1].tolist() == [6, 300]
    every[0].forget(2)
    assert every[1].total()[1].tolist() == [3, 200]


class CountingCapacity(Capacity):
    def __init__(self) -> None:
        super().__init__(bounds_tokens=True)
        self.checked: list[tuple[int, int]] = []  # sequences, tokens

    def check_request(self, info, num_samples, num_sequences, num_tokens=0) -> None:
        self.checked.append((num_sequences, num_tokens))
        super().check_request(info, num_samples, num_sequences, num_tokens)


@pytest.mark.parametrize(
    ("num_prompts", "expected"),
    [
        (1, [(1, 0), (1, 3)]),  # before it is tokenized; then its tokens, by the client
        (2, [(2, 0), (1, 3), (1, 3), (2, 6)]),  # and of all together
    ],
)
def test_nothing_is_checked_twice(serve, run, num_prompts, expected):
    capacity = CountingCapacity()

    async def scenario() -> None:
        async with serve(say([40]), capacity=capacity) as (pipeline, _):
            inputs = [GenerateInput(token_ids=(5, 6, 7))] * num_prompts
            started = await Generations.start(pipeline, inputs, lambda _: None, stream=False)
            await started.collect()

    run(scenario())
    assert capacity.checked == expected


def test_whoever_goes_to_the_client_directly_is_checked_too(serve, run):
    """As `LLM` does."""

    async def scenario() -> None:
        async with serve(capacity=Capacity(max_request_share=0.0, bounds_tokens=True)) as served:
            pipeline, engine = served
            sampling = SamplingParams(n=2, max_tokens=1)
            prompt = GenerateInput(token_ids=(5,) * 4000, sampling=sampling)
            with pytest.raises(RequestError, match=r"8000 prompt tokens, counted for each sample"):
                await pipeline.generate(prompt)
            assert not engine.submitted()

    run(scenario())
