"""Quantization of activations: `quantize_fp8`, `quantize_int8`, and FP8 fused with the previous op
(`rms_norm_fp8`, `silu_mul_fp8`)."""

from penstock.kernels.quantize.reference import (
    BLOCK,
    FP8_MAX,
    INT8_MAX,
    quantize_fp8,
    quantize_int8,
    rms_norm_fp8,
    silu_mul_fp8,
)

__all__ = [
    "BLOCK",
    "FP8_MAX",
    "INT8_MAX",
    "quantize_fp8",
    "quantize_int8",
    "rms_norm_fp8",
    "silu_mul_fp8",
]
