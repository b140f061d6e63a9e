"""How many prompt tokens run beside decodes: a number, or what the time of steps allows."""

import numpy as np
import pytest
from core_engine import Engine
from graph_steps import plan_of

from penstock.core.chunk_limit import ChunkLimit


def step_of(num_tokens: int, num_decodes: int = 1):
    texts = {row: np.zeros(1, np.int32) for row in range(num_decodes)}
    texts[num_decodes] = np.zeros(4096, np.int32)
    decodes = [(row, 1, 2) for row in range(num_decodes)]
    chunk = [(num_decodes, 0, num_tokens)] if num_tokens else []
    return plan_of(0, texts, decodes + chunk, [])


def test_a_fixed_limit_stays_whatever_steps_take():
    limit = ChunkLimit(100, 2048)
    limit.observe(step_of(100), 10.0)
    assert limit.num_tokens == 100
    assert ChunkLimit(4096, 2048).num_tokens == 2048


@pytest.mark.parametrize("token_ms", [0.1, 2.3, 50.0])
def test_a_measured_limit_comes_to_what_can_be_computed_in_time(token_ms):
    limit = ChunkLimit(None, 2048)
    for _ in range(12):
        limit.observe(step_of(limit.num_tokens), limit.num_tokens * token_ms / 1e3)
    expected = min(max(600 / token_ms, 256), 2048)
    assert abs(limit.num_tokens - expected) <= 1


def test_steps_that_tell_nothing_are_not_measured():
    limit = ChunkLimit(None, 2048)
    before = limit.num_tokens
    limit.observe(step_of(0, num_decodes=3), 60.0)
    limit.observe(step_of(100), 60.0)
    assert limit.num_tokens == before


def test_in_a_burst_a_step_has_more_tokens_decodes_included():
    limit = ChunkLimit(512, 8192, in_bursts=2048)
    assert limit.of_step(num_new=8, num_decodes=0) == 2048 and limit.of_step(8, 127) == 1921
    assert limit.of_step(7, 0) == limit.of_step(8, 128) == limit.of_step(0, 0) == 512
    assert limit.of_step(500, 1800) == 512  # never fewer than without a burst
    assert ChunkLimit(512, 8192).of_step(100, 1) == 512


def test_a_burst_is_counted_by_those_who_could_have_a_row():
    seen = []
    engine = Engine(num_blocks=64, max_num_tokens=8, max_batch_size=4, block_reuse=False)
    engine.scheduler._chunk_limit = lambda *counts: seen.append(counts) or 8
    for number in range(10):
        engine.submit([number] * 6, 3)
    engine.run_dry()
    assert seen[0] == (4, 0)
    assert max(new + decodes for new, decodes in seen) == 4 and seen[-1][0] == 0


def chunks_of(engine: Engine) -> list[tuple[int, int]]:
    """(decodes, prompt tokens) of every step with prompts that the device was given."""
    found = []
    forward = engine.device.forward

    def noted(plan):
        num_tokens = int(plan.num_tokens[plan.num_decodes :].sum())
        if num_tokens:
            found.append((plan.num_decodes, num_tokens))
        forward(plan)

    engine.device.forward = noted
    return found


def test_a_prompt_beside_a_stream_comes_in_chunks_and_alone_in_one():
    engine = Engine(num_blocks=64, max_num_tokens=40, block_reuse=False, partial_reuse=False)
    engine.scheduler._chunk_limit = lambda num_new, num_decodes: 6
    found = chunks_of(engine)
    engine.submit(tuple(range(1, 21)), max_tokens=12)
    engine.loop.turn()
    engine.submit(tuple(range(30, 50)), max_tokens=2)
    engine.run_dry()
    assert found == [(0, 20), (1, 6), (1, 6), (1, 6), (1, 2)]


def test_the_limit_counts_for_all_prompts_of_a_step_together():
    engine = Engine(num_blocks=64, max_num_tokens=40, block_reuse=False, partial_reuse=False)
    engine.scheduler._chunk_limit = lambda num_new, num_decodes: 6
    found = chunks_of(engine)
    engine.submit((1, 2, 3), max_tokens=20)
    engine.loop.turn()
    for first in (30, 40, 50):
        engine.submit(tuple(range(first, first + 4)), max_tokens=2)
    engine.run_dry()
    assert found[0] == (0, 3) and sum(tokens for _, tokens in found) == 15
    assert all(tokens <= 6 for _, tokens in found[1:])
