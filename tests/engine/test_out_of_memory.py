"""A step that runs out of device memory ends its own requests, once each, and nothing else."""

import pytest
import torch
from local_engine import LocalEngine

from penstock.types.request import FinishReason

PROMPTS = [[5 + i, 300, 41, 7 + i] for i in range(3)]


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_requests_of_the_step_fail_and_the_engine_goes_on(monkeypatch, where, is_overlapped):
    engine = LocalEngine("tiny", disable_overlap_scheduler=not is_overlapped)
    expected = engine.generate(PROMPTS, 6)

    runner = engine.runner
    real, num_calls = getattr(runner, where), 0

    def breaking(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise torch.OutOfMemoryError("no more")
        return real(*args)

    monkeypatch.setattr(runner, where, breaking)
    failed = [engine.submit(prompt, 6) for prompt in PROMPTS]
    engine.run()
    assert num_calls >= 3
    for rid, tokens in zip(failed, expected, strict=True):
        *others, last = engine.deltas[rid]
        assert last.finish is FinishReason.ERROR and "max_num_tokens" in last.error
        assert all(delta.finish is None for delta in others)
        assert 0 < len(engine.tokens(rid)) < 6 and tokens[: len(engine.tokens(rid))] == (
            engine.tokens(rid)
        )

    assert engine.generate(PROMPTS, 6) == expected
    assert engine.counters.running == engine.counters.used_blocks == 0
