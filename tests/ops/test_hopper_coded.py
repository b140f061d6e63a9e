"""Which coded weights the kernel for Hopper is given. What it computes: tests/gpu/coded_check."""

import logging
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import coded_case

from penstock.kernels.coded import coded_linear
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.coded import hopper, triton


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


@pytest.mark.parametrize(
    ("num_programs", "num_tiles", "splits"),
    [(32, 112, 12), (64, 224, 6), (396, 64, 1), (448, 64, 7), (1, 8, 2), (1, 3, 1)],
)
def test_splits_leave_few_places_empty(num_programs: int, num_tiles: int, splits: int) -> None:
    assert hopper._splits(num_programs, 396, num_tiles) == splits


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
