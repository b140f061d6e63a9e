"""benchmarks/admission.py: the scheduler's policies on a device that only takes time."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import admission
from simulated_chat import Device, simulate_chat

from penstock.bench.conversations import Workload
from penstock.config.run import CapacityPolicy
from penstock.core.chunk_limit import ChunkLimit


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
