"""benchmarks/admission.py: the scheduler's policies on a device that only takes time."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import admission

from penstock.config.run import CapacityPolicy


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
