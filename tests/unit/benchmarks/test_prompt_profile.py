"""Kernels of prompts are told apart by prompt, and their exclusive times are means."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from decode_profile import Span
from prompt_profile import by_prompt, lines_of


def test_prompts_are_told_apart_by_pauses_and_their_kernels_averaged():
    first = [Span("void gemm<float>(int)", 0, 10), Span("norm", 8, 14), Span("gemm", 700, 710)]
    second = [Span("gemm", 5000, 5004), Span("norm", 5900, 5903)]
    traced = by_prompt([*second, *first])
    assert traced == [first, second]
    gemm, norm = lines_of(traced)
    assert (gemm.name, gemm.count, gemm.us) == ("gemm", 1.5, 12)
    assert (norm.name, norm.count, norm.us) == ("norm", 1, 4.5)
    assert gemm.exclusive_us == pytest.approx(12)  # 10 + 10 and 4, of two prompts
    assert norm.exclusive_us == pytest.approx(3.5)  # 4 behind the GEMM, and 3
