"""Packed weights multiply as plain ones do, whatever the number of rows."""

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels.gemm import linear, packed
from penstock.kernels.tolerances import tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 300])
def test_a_packed_weight_gives_the_plain_product(dtype, has_bias, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    weight_OI = (torch.randn(96, 80, generator=generator) / 80**0.5).to(dtype)
    bias_O = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x_TI = torch.randn(num_rows, 160, generator=generator).to(dtype)[:, ::2]
    truth = F.linear(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    allowed = tolerance(dtype)
    with torch.inference_mode():
        ours = linear(x_TI, packed(weight_OI), bias_O)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), truth, atol=allowed.atol, rtol=allowed.rtol)


def test_packing_copies_so_that_a_shared_table_stays_readable():
    table = torch.randn(64, 32)
    before = table.clone()
    packed(table)
    assert torch.equal(table, before)
