"""benchmarks/admission.py: the scheduler's policies on a device that only takes time."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import admission
from simulated_chat import Device, Padding, simulate_chat

from penstock.bench.conversations import Workload
from penstock.config.graphs import CudaGraphConfig
from penstock.config.run import CapacityPolicy
from penstock.core.chunk_limit import ChunkLimit
from penstock.types.step import FROM_DEVICE


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_all_requests_are_answered_in_full(policy):
    jobs = [admission.Job(0.01 * i, 100 + i, 64, 1 + i) for i in range(12)]
    found = admission.simulate("70b-fp8-kv8", 0.9, policy, jobs)
    assert len(found.ttft_s) == 12 and found.num_preempted == 0
    assert 1 <= found.most_running <= 12
    assert 0 < found.tok_s < 12 * 1000 / 15  # a step takes 15 ms or more


def test_where_the_cache_is_short_only_the_packed_policy_preempts():
    """It holds 411,648 tokens: five prompts, but not their answers."""
    jobs = [admission.Job(0.0, 81_400, 1020, 1020) for _ in range(5)]

    def preempted(policy: CapacityPolicy) -> int:
        return admission.simulate("70b-fp8-kv8", 0.9, policy, jobs).num_preempted

    assert preempted(CapacityPolicy.MAX_UTILIZATION) > 0
    assert preempted(CapacityPolicy.GUARANTEED_NO_EVICT) == 0
    assert preempted(CapacityPolicy.EXPECTED_OUTPUT) == 0


def test_conversations_reuse_what_they_said_and_wait_for_large_steps():
    """Twelve streams; steps with all prompt tokens hold them up for longer than those with few."""
    workload, num = Workload(turns=(2, 2), max_answer_tokens=12, max_user_tokens=400), 24
    turns = [turn for number in range(num) for turn in workload.conversation(number)]
    config = replace(
        admission.run_config(CapacityPolicy.EXPECTED_OUTPUT, 64, 8192),
        depth=2, block_reuse=True, partial_reuse=True,
    )  # fmt: skip
    small, large = (
        simulate_chat(
            config, ChunkLimit(64, 8192, tokens).of_step, workload, num, Device([(64, 64)])
        )
        for tokens in (None, 8192)
    )
    for found in (small, large):
        assert found.num_out == sum(turn.num_answer for turn in turns)
        assert len(found.first_ttft_ms) == num and len(found.tpot_ms) == len(turns)
        assert found.num_cached > 256 * (num - 8) + sum(turn.num_user for turn in turns[::2]) / 2
    assert max(small.itl_ms) < 10 < max(large.itl_ms)
    assert small.num_eager <= 1 < large.num_eager


def entry(start: int, num_tokens: int, kv_len: int) -> SimpleNamespace:
    return SimpleNamespace(
        start=start, num_tokens=num_tokens, seq=SimpleNamespace(num_tokens=kv_len)
    )


def mixed_step(num_decodes: int, num_tokens: int) -> list[SimpleNamespace]:
    decodes = [entry(FROM_DEVICE, 1, 1024) for _ in range(num_decodes)]
    return [*decodes, entry(0, num_tokens, num_tokens)]


MIXES = sum(CudaGraphConfig().mixes(512, 8192), ())


@pytest.mark.parametrize(
    ("num_decodes", "num_tokens", "step_ms", "host_ms"),
    [
        (8, 43, 6.6, 1.6), (32, 43, 7.2, 1.1), (32, 256, 10.1, 1.1), (128, 512, 20.2, 2.0),
        (256, 512, 27.3, 3.2),
    ],
)  # fmt: skip
def test_a_mixed_step_takes_what_was_measured(num_decodes, num_tokens, step_ms, host_ms):
    """On an H200 (docs/notes/2026-11-mixed-steps.md): all of it, and without what the host took
    before the device began, which here is counted elsewhere."""
    found, is_eager = Device(MIXES).step(mixed_step(num_decodes, num_tokens))
    assert step_ms - host_ms <= found <= step_ms and not is_eager


def test_padding_is_part_of_a_step():
    step = mixed_step(50, 70)
    captured, none, total = (Device(MIXES, padding).step(step)[0] for padding in Padding)
    assert none < total < captured  # 120, 128 and 64 + 128 tokens
    exact = mixed_step(64, 128)
    assert Device(MIXES).step(exact) == Device(MIXES, Padding.NONE).step(exact)


def test_at_a_rate_conversations_meet_fewer_others():
    """Alone but for what it overlaps, a turn waits for nobody."""
    workload = Workload(turns=(1, 1), max_answer_tokens=12, max_user_tokens=400)
    config = replace(admission.run_config(CapacityPolicy.EXPECTED_OUTPUT, 64, 8192), depth=2)

    def seen(rate: float | None) -> tuple[float, float]:
        limit = ChunkLimit(512, 8192, 2048).of_step
        found = simulate_chat(config, limit, workload, 24, Device(MIXES), rate)
        return found.seconds, max(found.first_ttft_ms)

    (at_once_s, waits_ms), (seconds, alone_ms) = seen(None), seen(2.0)
    assert at_once_s < 1 and seconds > 6 and alone_ms < waits_ms
