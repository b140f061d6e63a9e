"""Which implementation each op takes on which GPU, by its compute capability alone."""

from dataclasses import replace

import pytest
import torch
from op_cases import OP_CASES

pytest.importorskip("triton")
from penstock.kernels import device as devices

ARCHS = (75, 80, 86, 89, 90, 100, 120)
FROM_80 = {
    "apply_bitmask": {"triton"}, "rms_norm": {"triton"}, "add_rms_norm": {"triton"},
    "silu_mul": {"triton"}, "gelu_mul": {"triton"}, "lora": {"triton"},
    "lora_groups": {"triton"},
    "sigmoid_mul": {"triton"}, "rope_kv_write": {"triton"}, "mla_write": {"triton"},
    "partial_decode": {"triton"},
    "mla_decode": {"triton"}, "mla_attend": {"triton"}, "mla_project": {"triton"},
    "quantize_int8": {"triton"},
    "quantize_nvfp4": {"triton"},
    "int8_linear": {"gemv", "int_mm", "triton"}, "weight_only_experts": {"triton"},
    "weight_only_linear": {"dequantized", "triton"}, "gated_linear": {"gemv", "small_m"},
    "decode_inputs": {"triton"}, "causal_conv": {"triton"}, "delta_gates": {"triton"},
    "gated_delta": {"triton"}, "keep_conv": {"triton"}, "keep_delta": {"triton"},
    "rms_norm_gated": {"triton"}, "router_logits": {"gemm", "gemv"},
    "add_shared": {"triton"}, "route": {"triton"},
    "sum_parts": {"triton"}, "sum_add_rms_norm": {"triton"},
    "experts": {"triton few", "triton grouped", "triton mxfp4"},
    "dense_linear": {"gemv", "reference"},  # torch's GEMM is the reference
}  # fmt: skip
FROM_89 = {"quantize_fp8", "quantize_mxfp8", "rms_norm_fp8", "silu_mul_fp8", "w4a8_linear"}
FROM_100 = {"scaled_experts", "scaled_linear"}
REFERENCE = {"reference"}


@pytest.fixture(scope="module")
def calls():
    return [(case.op, case.make(torch.bfloat16, torch.device("cpu"))) for case in OP_CASES]


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request, monkeypatch):
    """This machine says that it has such a GPU."""
    claimed = replace(devices._probe_cpu(), kind="cuda", arch=request.param)
    monkeypatch.setattr(devices, "_probe_cpu", lambda: claimed)
    devices.probe.cache_clear()
    yield request.param
    devices.probe.cache_clear()


def expected(arch: int) -> dict[str, set[str]]:
    found = {name: names if arch >= 80 else REFERENCE for name, names in FROM_80.items()}
    found |= {name: {"triton"} if arch >= 89 else REFERENCE for name in FROM_89}
    found |= {name: {"triton"} if arch >= 100 else REFERENCE for name in FROM_100}
    found["fp8_linear"] = {"gemv", "triton"} if arch >= 89 else REFERENCE
    if arch >= 90:
        found["dense_linear"] = {"gemv", "small_m", "reference"}
        found["fp8_linear"] = {"gemv", "small_m", "scaled_mm", "triton"}
    return found


def test_every_op_takes_what_the_gpu_can_run(arch, calls):
    picked: dict[str, set[str]] = {}
    for op, args in calls:
        picked.setdefault(op.reference.__name__, set()).add(op._pick("cuda", *args)[0].name)
    assert picked == expected(arch)


def test_kernels_for_hopper_are_for_hopper_alone(arch, calls):
    ops = {op.reference.__name__: op for op, _ in calls}
    found = {
        f"{op_name}/{name}"
        for op_name, op in ops.items()
        for name, impl in op.implementations().items()
        if impl.needs.max_arch and impl.needs.missing() is None
    }
    hopper = {
        "experts/hopper fp8 blocks",
        "experts/hopper mxfp4",
        "weight_only_experts/hopper",
        "weight_only_linear/hopper",
    }
    assert found == (hopper if arch == 90 else set())
