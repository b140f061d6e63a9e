"""8-bit floats: making them (`quantize_fp8`, `rms_norm_fp8`, `silu_mul_fp8`), multiplying them
(`fp8_linear`)."""

from penstock.kernels.fp8.reference import (
    BLOCK,
    LARGEST,
    fp8_linear,
    quantize_fp8,
    rms_norm_fp8,
    silu_mul_fp8,
    weight_values,
)

__all__ = [
    "BLOCK",
    "LARGEST",
    "fp8_linear",
    "quantize_fp8",
    "rms_norm_fp8",
    "silu_mul_fp8",
    "weight_values",
]
