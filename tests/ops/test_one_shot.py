"""The all-reduce of one rank with its flags, in Triton's interpreter, which runs no two at once."""

import pytest
import torch

pytest.importorskip("triton")
from penstock.kernels.all_reduce.triton import one_shot
from penstock.kernels.norm import add_rms_norm


@pytest.mark.parametrize("size", [64, 200])
def test_a_rank_writes_its_part_meets_itself_and_leaves_flags_clear(size):
    x, residual = torch.randn(5, size), torch.randn(5, size)
    weight = torch.rand(size)
    shared, flags = torch.zeros(5, size), torch.zeros(5, 1, dtype=torch.int32)
    tables = [torch.tensor([one.data_ptr()]) for one in (shared, flags)]
    for _ in range(2):
        found = one_shot(x, *tables, 0, (residual, weight, 1e-5))
        for one, right in zip(
            found, add_rms_norm.reference(x, residual, weight, 1e-5), strict=True
        ):
            torch.testing.assert_close(one, right)
        assert torch.equal(shared, x)
        assert not flags.any()
    assert torch.equal(one_shot(x * 3, *tables, 0, None)[1], x * 3)
