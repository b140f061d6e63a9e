"""Tuning of the GEMV and the small-M GEMM for `kernels.tuning`: candidates, and a GEMM to run.

Legend: T tokens, I inputs, O outputs, D channels of the norm before.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import tuning_case
from penstock.kernels.gemm.fp8_triton import fp8_linear_scaled_mm
from penstock.kernels.gemm.gemv import GemvConfig, gemv, gemv_config
from penstock.kernels.gemm.small_m import (
    USE_CUBLAS,
    SmallMGemmConfig,
    small_m_gemm,
    small_m_gemm_config,
)
from penstock.kernels.norm.reference import rms_norm
from penstock.kernels.tuning_case import Case

TOKENS = {"gemv": (1, 2), "small_m": (16, 32, 64)}  # by op
GemmConfig = GemvConfig | SmallMGemmConfig

_BEFORE_SIZE = 2048  # channels of the norm before a GEMM
# Outputs of a program, bytes of a row, warps, stages: what was best of 69 for some matrix.
_SMALL_M = (
    *((64, 256, 4, stages) for stages in (2, 4, 5, 6, 8)),
    *((64, 128, 4, stages) for stages in (3, 4)),
    *((128, 128, 8, stages) for stages in (3, 4)),
    *((128, 256, 4, stages) for stages in (2, 4)),
    *((32, 512, 4, stages) for stages in (4, 6)),
    *((16, 512, 4, stages) for stages in (6, 8)),
)


def now_used(op: str, d: dict[str, int], is_gated: bool) -> GemmConfig:
    sizes = d["outputs"], d["inputs"], d["bits"] // 8, d["tokens"]
    return gemv_config(*sizes) if op == "gemv" else small_m_gemm_config(*sizes, is_gated)


def candidates(op: str, d: dict[str, int], is_gated: bool) -> list[GemmConfig]:
    """Without the present one."""
    if op == "gemv":
        return [
            GemvConfig(rows, block, num_warps)
            for rows in (1, 2, 4)
            for block in (1024, 2048, 4096, 8192)
            for num_warps in (2, 4, 8)
            if rows * block * d["tokens"] <= 4096 * num_warps
        ]
    return [*(() if is_gated else (USE_CUBLAS,)), *(SmallMGemmConfig(*one) for one in _SMALL_M)]


def case(
    d: dict[str, int],
    is_gated: bool,
    outputs: int,
    device: torch.device,
    read_tbps: float | None,
    copies: int | None = None,
) -> Case:
    """A GEMM with a matrix of so many outputs; the roofline is reading it once."""
    inputs, tokens = d["inputs"], d["tokens"]
    dtype = torch.float8_e4m3fn if d["bits"] == 8 else torch.bfloat16
    num_bytes = outputs * inputs * d["bits"] // 8
    copies = copies or max(2, tuning_case.L2_BYTES // num_bytes + 1)
    weights = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(copies)]
    x_TI = torch.randn(tokens, inputs, device=device).to(dtype)
    scale = torch.full((1,), inputs**-0.25, device=device) if d["bits"] == 8 else None
    if scale is None:
        x_TI *= inputs**-0.5
    small_TD = torch.ones(tokens, _BEFORE_SIZE, dtype=torch.bfloat16, device=device)

    def run(config: GemvConfig | SmallMGemmConfig, weight_OI: Tensor) -> Tensor:
        scaled = (x_TI, scale, weight_OI, scale, None, torch.bfloat16)
        if isinstance(config, GemvConfig):
            return gemv(*scaled, is_gated=is_gated, config=config)
        # As in a layer: behind a small kernel cuBLAS begins when that has ended, ours overlaps.
        rms_norm(small_TD, small_TD[0], 1e-6)
        if config.outputs:
            return small_m_gemm(*scaled, is_gated=is_gated, config=config)
        if scale is None:
            return F.linear(x_TI, weight_OI)
        return fp8_linear_scaled_mm(x_TI, scale, weight_OI, scale, None, torch.bfloat16)

    return Case(
        f"{outputs} x {inputs}",
        None if read_tbps is None else num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config, weight) for weight in weights],
        lambda config: run(config, weights[0]),
    )
