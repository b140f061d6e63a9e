"""Which coded weights the kernel for Hopper is given. What it computes: tests/gpu/coded_check."""

import logging
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import coded_case, coded_experts_case

from penstock.kernels.coded import coded_experts, coded_linear
from penstock.kernels.gemm.splits import even_splits
from penstock.kernels.moe import SILU, Gate, gated
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.coded import hopper, triton
from penstock.kernels.coded.sums import gated_parts


def make(num_tokens: int = 3, num_outputs: int = 32, dtype: torch.dtype = torch.bfloat16) -> Any:
    return coded_case("int4", num_tokens, 256, num_outputs).make(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "dtype", "is_taken"),
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
    num_outputs: int,
    dtype: torch.dtype,
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "_HOPPER", StandIn(fits=hopper.fits))
    args = make(num_tokens, num_outputs, dtype)
    assert coded_linear.implementations()["hopper"].fits(*args) == is_taken


def make_experts(
    num_tokens: int = 6, size: int = 256, features: int = 128, dtype: torch.dtype = torch.bfloat16,
    group: int = 64, **shape: Any,
) -> Any:  # fmt: skip
    case = coded_experts_case("int4", num_tokens, 4, 2, size, features, group=group, **shape)
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
    monkeypatch.setattr(triton, "_HOPPER", StandIn(fits_experts=hopper.fits_experts))
    args = make_experts(**shape)
    assert coded_experts.implementations()["hopper"].fits(*args) == is_taken


@pytest.mark.parametrize(
    ("num_programs", "num_tiles", "splits"),
    [(32, 112, 12), (64, 224, 6), (396, 64, 1), (448, 64, 7), (1, 8, 2), (1, 3, 1)],
)
def test_splits_leave_few_places_empty(num_programs: int, num_tiles: int, splits: int) -> None:
    assert even_splits(num_programs, 396, num_tiles) == splits
    assert even_splits(num_programs, 396, num_tiles, max_splits=1) == 1


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(5, 8), (160, 8), (256, 16), (512, 32), (2048, 64), (8192, 128)]
)
def test_experts_seldom_need_two_blocks_before_blocks_are_large(num_tokens: int, rows: int) -> None:
    assert hopper.block_rows(num_tokens * 8, 256) == rows and rows in hopper.CONFIGS


@pytest.mark.parametrize("gate", [SILU, Gate(alpha=1.7, shift=1.0, limit=0.5)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_are_added_up_and_gated(num_parts: int, gate: Gate, device: torch.device) -> None:
    parts = torch.randn(num_parts, 5, 1200, device=device)
    expected = gated.reference(parts.sum(0), gate)
    close = tolerance(torch.float32)
    h = gated_parts(parts, gate, torch.float32)
    torch.testing.assert_close(h, expected, atol=close.atol, rtol=close.rtol)


def test_places_without_a_pair_are_left_out(device: torch.device) -> None:
    parts = torch.randn(2, 6, 64, device=device)
    pairs_BM = torch.tensor([[2, 0, 3], [1, 3, 3]], dtype=torch.int32, device=device)
    parts[:, pairs_BM.flatten() == 3] = torch.nan
    h = gated_parts(parts, SILU, torch.float32, pairs_BM, num_pairs=3)
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
        found = [triton.coded_linear_on_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    close, expected = tolerance(torch.float32), coded_linear.reference(*args)
    for y_TO in found:
        torch.testing.assert_close(y_TO, expected, atol=close.atol, rtol=close.rtol)


def test_after_one_failure_experts_are_computed_by_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(triton, "_HOPPER", StandIn(experts=failing(calls)))
    args = make_experts(dtype=torch.float32, size=128, features=64)
    with caplog.at_level(logging.WARNING):
        found = [triton.coded_experts_on_hopper(*args) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    close, expected = tolerance(torch.float32), coded_experts.reference(*args)
    for y_TD in found:
        torch.testing.assert_close(y_TD, expected, atol=close.atol, rtol=close.rtol)
