"""What only a GPU times, launched once on a CPU in Triton's interpreter: a kernel or an op whose
signature has changed shows here. Sizes are small, and nothing is timed."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests/ops", "tests/gpu")]

import fp8_check  # noqa: E402
import kernel_times  # noqa: E402
import moe_check  # noqa: E402
import quant_times  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them as they are")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    def once(launches: Sequence[Callable[[], Any]], budget_ms: float = 0.0) -> float:
        launches[0]()
        return 1.0

    for script in (fp8_check, kernel_times, moe_check, quant_times):
        monkeypatch.setattr(script, "DEVICE", CPU)
        monkeypatch.setattr(script, "time_graph_us", once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_attention_is_launched(monkeypatch):
    """Numbers mean nothing: in the interpreter a product of bfloat16 is none."""
    for name, value in (("HEADS", 4), ("KV_HEADS", 1)):
        monkeypatch.setattr(kernel_times, name, value)
    decode = kernel_times.DecodeRun(2, 64)
    assert len(decode.times(kernel_times.DECODE_CONFIGS[:1])) == 1
    prefill = kernel_times.PrefillRun(1, 64)
    assert len(prefill.times([None, kernel_times.PREFILL_CONFIGS[1]])) == 2


def test_small_ops_are_launched():
    launches = kernel_times.small_ops(1)
    assert {name.split()[0] for name, _, _ in launches} >= {"rms_norm", "add_rms_norm", "silu_mul"}
    for _, _, launch in launches:
        launch()


@pytest.mark.parametrize("name", quant_times.FORMATS)
def test_a_gemm_of_every_format_is_launched(name):
    gemm, num_bytes = quant_times.FORMATS[name][0](quant_times.inputs(2, 256), 64)
    y = gemm()
    assert y.shape == (2, 64) and y.isfinite().all() and num_bytes > 0


@pytest.mark.parametrize("name, weights", [("plain", 16), ("fp8 blocks", 8), ("mxfp4", 4)])
def test_experts_are_launched_with_every_config(name, weights):
    layer = moe_check.Layer(name, 4, 2, 128, 128)
    assert layer.bits == weights
    [args] = moe_check.arguments(layer, 2, 1)
    expected = moe_check.experts.reference(*args).float()
    runs = moe_check.variants(layer, 2)
    kinds = {what.split()[0]: run for what, run in runs.items()}  # one of each
    assert len(kinds) > 1
    for what, run in kinds.items():
        found = run(*args).float()
        assert (found - expected).abs().max() < 0.1 * expected.abs().max(), what


def test_fp8_gemms_and_ops_are_launched(monkeypatch, capsys):
    monkeypatch.setattr(fp8_check, "TOKENS", (1,))
    monkeypatch.setattr(fp8_check, "MATRICES", {"8B down": (128, 128)})
    fp8_check.time_matrices()
    fp8_check.time_small_ops()
    assert not fp8_check.FAILED
    assert "triton" in capsys.readouterr().out
