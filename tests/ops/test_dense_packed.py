"""The GEMM with a weight in oneDNN's layout: the same numbers, in few sizes."""

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels.gemm.dense import linear, packed, padded_rows


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16, 17, 33, 100, 257])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_rows(num_tokens: int, has_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, 40), torch.randn(24, 40)
    bias = torch.randn(24) if has_bias else None
    found = linear(x, packed(weight), bias)
    assert found.shape == (num_tokens, 24)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


def test_few_sizes_and_little_padding() -> None:
    sizes = {n: padded_rows(n) for n in range(1, 2049)}
    assert all(n <= size <= max(16, n + n / 8 + 1) for n, size in sizes.items())
    assert len(set(sizes.values())) < 80
    assert sizes[16] == 16 and sizes[2048] == 2048
