"""Admission by what outputs will probably take."""

import numpy as np
import pytest
from core_engine import PROMPT, Engine
from fake_executor import oracle

from penstock.config.run import CapacityPolicy
from penstock.core.policy import OutputLengths
from penstock.core.sequence import Sequence
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

EXPECTED = CapacityPolicy.EXPECTED_OUTPUT


def sequence(num_written: int, max_tokens: int) -> Sequence:
    request = Request(id=1, prompt_ids=(1, 2), sampling=SamplingParams(), max_tokens=max_tokens)
    seq = Sequence(request, (0, 0))
    for _ in range(num_written):
        seq.append(3)
    return seq


def left(lengths: OutputLengths, num_written: int, max_tokens: int) -> float:
    return float(lengths.left([sequence(num_written, max_tokens)])[0])


def test_before_any_output_has_ended_a_length_is_guessed():
    lengths = OutputLengths()
    assert left(lengths, 0, 300) == 300
    assert left(lengths, 100, 300) == 200
    assert left(lengths, 0, 100_000) == 1024
    assert left(lengths, 1000, 100_000) == 1000  # as much again
    assert left(lengths, 300, 300) == 1


def test_outputs_are_expected_to_be_like_recent_ones_that_were_as_long():
    lengths = OutputLengths()
    for _ in range(256):
        lengths.add(100)
        lengths.add(500)
    assert left(lengths, 0, 100_000) == pytest.approx(300, rel=0.03)
    assert left(lengths, 100, 100_000) == pytest.approx(400, rel=0.03)
    assert left(lengths, 0, 50) == 50
    assert left(lengths, 600, 100_000) == 600  # none of them was
    for _ in range(512):
        lengths.add(40)
    assert left(lengths, 0, 100_000) == pytest.approx(40, abs=8)  # the others are forgotten


def test_many_sequences_are_looked_at_together():
    lengths = OutputLengths()
    lengths.add(200)
    every = [sequence(n, 1000) for n in (0, 150, 400)]
    one_by_one = [left(lengths, seq.num_output, 1000) for seq in every]
    np.testing.assert_allclose(lengths.left(every), one_by_one)


def most_running(engine: Engine) -> int:
    most = 0
    while engine.scheduler.has_work or engine.inbox:
        engine.loop.turn()
        most = max(most, len(engine.scheduler.running))
    return most


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_start_than_the_cache_will_do_for(depth):
    engine = Engine(num_blocks=9, depth=depth, max_num_tokens=32, capacity_policy=EXPECTED)
    rids = [engine.submit((i, i + 1, i + 2, i + 3), max_tokens=10) for i in range(4)]
    assert most_running(engine) == 2  # of 14 tokens, 4 blocks, each; there are 8
    assert engine.counters.preemptions == 0
    assert all(engine.ends[rid] == [FinishReason.LENGTH] for rid in rids)


def test_what_ends_soon_makes_room_for_what_begins():
    engine = Engine(num_blocks=9, max_num_tokens=32, capacity_policy=EXPECTED)
    first = engine.submit(tuple(range(16)), max_tokens=8)  # to 23 tokens: 6 of 8 blocks
    for _ in range(7):
        engine.loop.turn()
    engine.submit((1, 2, 3), max_tokens=10)  # 3 blocks, of which two are needed before that ends
    for _ in range(2):
        engine.loop.turn()
    assert len(engine.scheduler.running) == 2 and not engine.ends[first]
    engine.run_dry()
    assert engine.counters.preemptions == 0


def test_a_shared_prompt_counts_once():
    engine = Engine(num_blocks=17, max_num_tokens=32, capacity_policy=EXPECTED)
    prompt = tuple(range(33))
    engine.submit(prompt, max_tokens=1)
    engine.run_dry()
    for _ in range(3):  # 9 blocks each, of which 8 are the same ones
        engine.submit(prompt, max_tokens=8)
    assert most_running(engine) == 3
    assert engine.counters.preemptions == 0


def test_outputs_shorter_than_allowed_let_more_start():
    def run(num_before: int) -> int:
        engine = Engine(
            num_blocks=33, max_num_tokens=32, max_batch_size=16, capacity_policy=EXPECTED
        )
        for _ in range(num_before):
            engine.submit((1,), max_tokens=2)
        engine.run_dry()
        for i in range(16):
            engine.submit((i, i + 1), max_tokens=60)
        return most_running(engine)

    assert run(0) < run(200)


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_drafts_never_need_more_cache_than_the_request_could_fill_by_itself(policy):
    """Each decode may bring 1 to 3 tokens, and counts as all of them while it is in flight."""
    num_tokens = 8 * 4 + 1  # of prompt and output: the last one is never fed
    for too_many in (0, 1):
        engine = Engine(
            num_blocks=9, depth=2, drafts=lambda text: (2, sum(text) % 3),
            max_batch_size=1, capacity_policy=policy,
        )  # fmt: skip
        max_tokens = num_tokens - len(PROMPT) + too_many
        rid = engine.submit(PROMPT, max_tokens=max_tokens)
        engine.run_dry()
        if too_many:
            assert engine.ends[rid] == [FinishReason.ERROR] and not engine.tokens[rid]
        else:
            assert engine.tokens[rid] == oracle(PROMPT, max_tokens)
            assert engine.counters.preemptions == 0
            drafted_tokens = engine.counters.drafted_tokens
            assert 0 < engine.counters.accepted_tokens < drafted_tokens
            assert drafted_tokens <= 2 * engine.counters.decodes
            assert engine.counters.decodes + engine.counters.accepted_tokens + 1 >= max_tokens
