"""MXFP8 and NVFP4 as they are specified, and the GEMM where weights become E4M3 first."""

import pytest
import torch
from op_cases import scaled_experts_case, scaled_linear_case
from op_compare import differences

from penstock.kernels.quantize.block_scaled import (
    e2m1_codes,
    e2m1_values,
    mxfp8_values,
    nvfp4_values,
    quantize_mxfp8,
    quantize_nvfp4,
)

pytest.importorskip("triton")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e2m1_rounds_to_the_nearest_value_and_ties_to_the_even_code() -> None:
    x = torch.arange(-1024, 1025) / 128
    values = torch.tensor(E2M1)
    distance = (x.abs()[:, None] - values).abs()
    nearest = distance <= distance.amin(1, keepdim=True)
    wanted = [max(row.nonzero().flatten().tolist(), key=lambda c: c % 2 == 0) for row in nearest]
    codes = e2m1_codes(x)
    assert (codes & 7).tolist() == wanted
    assert (codes >> 3).tolist() == [int(value < 0) for value in x.tolist()]
    pairs = (codes[:-1] | codes[:-1] << 4)[:, None]
    assert torch.equal(e2m1_values(pairs)[:, 1], values[wanted][:-1] * x[:-1].sign())


def test_mxfp8_has_the_smallest_power_that_keeps_a_group_in_range() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 320) * torch.exp2(torch.randint(-40, 40, (7, 320)).float())
    x[0, :32], x[1, 0] = 0.0, 448.0 * 2**20
    values, powers = quantize_mxfp8(x)
    largest, scale = x.unflatten(1, (-1, 32)).abs().amax(-1), torch.exp2(powers.float() - 127)
    assert bool((largest <= 448 * scale).all())
    assert bool((largest > 448 * scale / 2)[largest > 0].all())
    close = mxfp8_values(values, powers)
    exact = (x.unflatten(1, (-1, 32)) / scale[..., None]).to(torch.float8_e4m3fn).float()
    assert torch.equal(close, (exact * scale[..., None]).flatten(1))


def test_nvfp4_is_within_half_a_step_and_saturates_beyond_its_range() -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(5, 160), torch.tensor([4 / (448 * 6)])
    codes, scales = quantize_nvfp4(x, scale)
    found = nvfp4_values(codes, scales, scale).unflatten(1, (-1, 16))
    largest = x.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
    # Half a step of E2M1 between 4 and 6, and what the scale itself was rounded by.
    assert bool(((found - x.unflatten(1, (-1, 16))).abs() <= largest * (1 / 6 + 1 / 16)).all())
    assert nvfp4_values(*quantize_nvfp4(1000 * x, scale), scale).abs().max() == pytest.approx(4.0)
    assert not nvfp4_values(*quantize_nvfp4(0 * x, scale), scale).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_become_e4m3_where_tensor_cores_take_no_mix(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    from penstock.kernels.gemm import block_scaled_triton

    monkeypatch.setattr(block_scaled_triton, "_MIXED_ARCH", 0)
    for case in (
        scaled_linear_case(5, 224, 136, nvfp4=False),
        scaled_experts_case(6, 4, 2, 128, 64, nvfp4=False),
    ):
        assert differences(case, case.op.implementations()["triton"], dtype, device) == []
