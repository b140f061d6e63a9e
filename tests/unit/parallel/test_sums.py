"""Where sums over ranks go. The other way is a stand-in: it takes memory that GPUs share."""

from dataclasses import replace

import pytest
import torch

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels.all_reduce import sum_add_rms_norm, sum_parts
from penstock.parallel.collectives import all_reduce, all_reduce_add_rms_norm
from penstock.parallel.mesh import RankMesh


class OtherRankHas:
    """Two ranks, of which one is not here."""

    def __init__(self, part_TD: torch.Tensor) -> None:
        self._part = part_TD

    def fits(self, x: torch.Tensor) -> bool:
        return x.shape == self._part.shape

    def all_reduce(self, x_TD):
        return sum_parts(torch.stack([x_TD, self._part]))

    def all_reduce_add_rms_norm(self, x_TD, residual_TD, weight_D, eps):
        return sum_add_rms_norm(torch.stack([x_TD, self._part]), residual_TD, weight_D, eps)


def test_small_sums_go_the_other_way_and_what_does_not_fit_goes_through_the_group():
    other = torch.randn(3, 8)
    role = replace(RankMesh.single().role("attention"), one_shot=OtherRankHas(other))
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    assert torch.equal(all_reduce(x.clone(), role), x + other)
    normed, total = all_reduce_add_rms_norm(x.clone(), residual, weight, 1e-5, role)
    torch.testing.assert_close(total, x + other + residual)
    torch.testing.assert_close(
        normed, torch.nn.functional.rms_norm(total, (8,), weight, 1e-5), rtol=1e-5, atol=1e-5
    )
    larger = torch.randn(4, 8)
    assert torch.equal(all_reduce(larger.clone(), role), larger)  # a group of nobody else
    normed, total = all_reduce_add_rms_norm(
        larger.clone(), larger, weight, 1e-5, RankMesh.single().role("attention")
    )
    torch.testing.assert_close(total, 2 * larger)


def test_strategies_that_are_not_there_are_refused():
    assert EngineConfig(allreduce_strategy="oneshot").allreduce_strategy == "ONESHOT"
    with pytest.raises(ConfigError, match="allreduce_strategy is 'MNNVL', it must be 'AUTO'"):
        EngineConfig(allreduce_strategy="MNNVL")
