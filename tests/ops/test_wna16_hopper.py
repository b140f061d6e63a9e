"""Which weights the W4A16 kernel for Hopper takes. Its results: tests/gpu/weight_only_check."""

import logging
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import weight_only_case, weight_only_experts_case

from penstock.kernels.gemm.split_k import choose_split_k
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.moe import SILU, Gate, gated
from penstock.kernels.moe.wna16 import weight_only_experts
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.gemm import wna16_hopper as hopper
from penstock.kernels.gemm import wna16_triton as triton
from penstock.kernels.moe import mxfp4_hopper, wna16_hopper, wna16_triton
from penstock.kernels.moe.split_k_gate import gated_partials


def make(num_tokens: int = 3, out_features: int = 32, dtype: torch.dtype = torch.bfloat16) -> Any:
    return weight_only_case("int4", num_tokens, 256, out_features).make(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_tokens", "out_features", "dtype", "is_taken"),
    [
        (1, 32, torch.bfloat16, True),
        (512, 32, torch.bfloat16, True),
        (513, 32, torch.bfloat16, False),
        (1, 32, torch.float16, False),
        (1, 40, torch.bfloat16, False),  # rows of two tiles in one line
    ],
)
def test_takes_some_tokens_in_bfloat16_and_whole_lines_of_rows(
    num_tokens: int,
    out_features: int,
    dtype: torch.dtype,
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "_HOPPER", StandIn(fits=hopper.fits))
    args = make(num_tokens, out_features, dtype)
    assert weight_only_linear.implementations()["hopper"].fits(*args) == is_taken


def make_experts(
    num_tokens: int = 6, size: int = 256, features: int = 128, dtype: torch.dtype = torch.bfloat16,
    group: int = 64, **shape: Any,
) -> Any:  # fmt: skip
    case = weight_only_experts_case("int4", num_tokens, 4, 2, size, features, group=group, **shape)
    return case.make(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [
        (dict(num_tokens=1), True),
        (dict(num_tokens=2000), True),
        (dict(dtype=torch.float16), False),
        (dict(size=200, features=200, group=200), False),  # rows of two tiles in one line
        (dict(ordered=True), False),  # inputs would be gathered for each expert
    ],
)
def test_takes_experts_of_any_number_of_tokens(
    shape: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wna16_triton, "_HOPPER", StandIn(fits=wna16_hopper.fits))
    args = make_experts(**shape)
    assert weight_only_experts.implementations()["hopper"].fits(*args) == is_taken


@pytest.mark.parametrize(
    ("num_programs", "num_tiles", "splits"),
    [(32, 112, 12), (64, 224, 6), (396, 64, 1), (448, 64, 7), (1, 8, 2), (1, 3, 1)],
)
def test_splits_leave_few_places_empty(num_programs: int, num_tiles: int, splits: int) -> None:
    assert choose_split_k(num_programs, 396, num_tiles) == splits
    assert choose_split_k(num_programs, 396, num_tiles, max_splits=1) == 1


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(5, 8), (160, 8), (256, 16), (512, 32), (2048, 64), (8192, 128)]
)
def test_experts_seldom_need_two_blocks_before_blocks_are_large(num_tokens: int, rows: int) -> None:
    assert mxfp4_hopper.block_rows(num_tokens * 8, 256) == rows and rows in hopper.CONFIGS


@pytest.mark.parametrize("gate", [SILU, Gate(alpha=1.7, shift=1.0, limit=0.5)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_are_added_up_and_gated(num_parts: int, gate: Gate, device: torch.device) -> None:
    parts = torch.randn(num_parts, 5, 1200, device=device)
    expected = gated.reference(parts.sum(0), gate)
    close = tolerance(torch.float32)
    h = gated_partials(parts, gate, torch.float32)
    torch.testing.assert_close(h, expected, atol=close.atol, rtol=close.rtol)


def test_places_without_a_pair_are_left_out(device: torch.device) -> None:
    parts = torch.randn(2, 6, 64, device=device)
    pairs_BM = torch.tensor([[2, 0, 3], [1, 3, 3]], dtype=torch.int32, device=device)
    parts[:, pairs_BM.flatten() == 3] = torch.nan
    h = gated_partials(parts, SILU, torch.float32, pairs_BM, num_pairs=3)
    has_pair = pairs_BM.flatten() < 3
    expected = gated.reference(parts.sum(0)[has_pair], SILU)
    close = tolerance(torch.float32)
    torch.testing.assert_close(h[has_pair], expected, atol=close.atol, rtol=close.rtol)


def test_after_one_failure_the_other_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(triton, "_HOPPER", StandIn(linear=failing(calls)))
    args = make(dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = [triton.weight_only_linear_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    close, expected = tolerance(torch.float32), weight_only_linear.reference(*args)
    for y_TO in found:
        torch.testing.assert_close(y_TO, expected, atol=close.atol, rtol=close.rtol)


def test_after_one_failure_experts_are_computed_by_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(wna16_triton, "_HOPPER", StandIn(experts=failing(calls)))
    args = make_experts(dtype=torch.float32, size=128, features=64)
    with caplog.at_level(logging.WARNING):
        found = [wna16_triton.weight_only_experts_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    close, expected = tolerance(torch.float32), weight_only_experts.reference(*args)
    for y_TD in found:
        torch.testing.assert_close(y_TD, expected, atol=close.atol, rtol=close.rtol)
