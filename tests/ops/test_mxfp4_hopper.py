"""Which experts the MXFP4 kernel for Hopper is given. What it computes: tests/gpu/moe_check."""

import logging
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import experts_case

from penstock.kernels.moe import experts
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.moe import mxfp4_hopper as hopper_mxfp4
from penstock.kernels.moe import mxfp4_triton as triton_mxfp4


def make(num_tokens: int = 6, features: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    case = experts_case(num_tokens, 4, 2, 64, features, format="mxfp4", bias=True)
    return case.make(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_tokens", "features", "dtype", "is_taken"),
    [
        (3, 64, torch.bfloat16, True),
        (2, 64, torch.bfloat16, False),  # so few are not sorted
        (5, 64, torch.float16, False),
        (5, 40, torch.bfloat16, False),  # rows of two experts in one line
    ],
)
def test_takes_many_tokens_in_bfloat16_and_whole_lines_of_rows(
    num_tokens: int,
    features: int,
    dtype: torch.dtype,
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_mxfp4, "_HOPPER", StandIn(fits=hopper_mxfp4.fits))
    args = make(num_tokens, features, dtype)
    assert experts.implementations()["hopper mxfp4"].fits(*args) == is_taken


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(5, 8), (160, 8), (256, 16), (512, 32), (1024, 32), (2048, 64), (8192, 128)],
)
def test_experts_seldom_need_two_blocks_before_blocks_are_large(num_tokens: int, rows: int) -> None:
    assert hopper_mxfp4.block_rows(num_tokens * 4, 128) == rows and rows in hopper_mxfp4.CONFIGS


def test_after_one_failure_the_other_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(triton_mxfp4, "_HOPPER", StandIn(experts=failing(calls)))
    args = make(dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = [triton_mxfp4.experts_mxfp4_on_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    assert "PassManager::run failed" in caplog.records[0].getMessage()
    close, expected = tolerance(torch.float32), experts.reference(*args)
    for y_TD in found:
        torch.testing.assert_close(y_TD, expected, atol=close.atol, rtol=close.rtol)
