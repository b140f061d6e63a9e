"""Which FP8 experts the kernel for Hopper is given. What it computes: tests/gpu/moe_check."""

import logging
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import experts_case

from penstock.kernels.moe import experts
from penstock.kernels.quantize.fp8_triton import quantize_fp8_triton
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.moe import fp8_hopper, grouped_gemm


def make(
    num_tokens: int = 6, features: int = 1024, dtype: torch.dtype = torch.bfloat16, **case: Any
) -> Any:
    case = {"format": "fp8 blocks"} | case
    return experts_case(num_tokens, 4, 2, 128, features, **case).make(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("args", "is_taken"),
    [
        (make(), True),
        (make(features=512), False),  # the second GEMM is over before its pipeline is full
        (make(num_tokens=128, features=512), True),  # 64 pairs of an expert
        (make(dtype=torch.float16), False),
        (make(bias=True), False),
        (make(format="fp8 rows"), False),
    ],
)
def test_takes_long_gemms_in_bfloat16(
    args: Any, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_gemm, "_HOPPER", StandIn(fits=fp8_hopper.fits))
    assert experts.implementations()["hopper fp8 blocks"].fits(*args) == is_taken


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(5, 8), (128, 8), (256, 16), (512, 32), (1024, 64), (8192, 64)]
)
def test_experts_seldom_need_two_blocks_before_blocks_are_large(num_tokens: int, rows: int) -> None:
    assert fp8_hopper.block_rows(num_tokens * 8, 256) == rows and rows in fp8_hopper.CONFIGS


def test_inputs_are_quantized_in_the_order_of_blocks(device: torch.device) -> None:
    """As the op quantizes each token; the scales of a block's pairs lie side by side."""
    x_TD = torch.randn(3, 256, dtype=torch.bfloat16, device=device)
    pairs_BM = torch.tensor([[5, 0, 6], [2, 6, 6]], dtype=torch.int32, device=device)
    values, scales = fp8_hopper.quantized_places(x_TD, pairs_BM, 6, 2)
    expected, expected_scales = quantize_fp8_triton(x_TD, None, 128)
    places, tokens = torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1])
    assert torch.equal(values[places].float(), expected[tokens].float())
    assert torch.equal(scales.t()[places], expected_scales[tokens])
    again, _ = fp8_hopper.quantized_places(x_TD.repeat(2, 1), pairs_BM, 6, 0)
    assert torch.equal(again[places].float(), expected[places % 3].float())


def test_after_one_failure_the_other_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(grouped_gemm, "_HOPPER", StandIn(experts=failing(calls)))
    args = make(features=128, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = [grouped_gemm.experts_fp8_on_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    assert "PassManager::run failed" in caplog.records[0].getMessage()
    close, expected = tolerance(torch.float32), experts.reference(*args)
    for y_TD in found:
        torch.testing.assert_close(y_TD, expected, atol=close.atol, rtol=close.rtol)
