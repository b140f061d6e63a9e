"""GEMMs with a model's weights: `linear` with plain ones, `fp8_linear` and `int8_linear` (W8A8),
`weight_only_linear` (W4A16, W8A16), `w4a8_linear` (INT4 with FP8), `packed_linear` with low-bit
weights on a CPU, and `gated_linear`, fused with SiLU for small M. `packed_rows` looks rows up
instead."""

from penstock.kernels.gemm.dense import linear, packed
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.gemm.gated import gated_linear
from penstock.kernels.gemm.int8 import int8_linear
from penstock.kernels.gemm.quantized_cpu import (
    CpuPackedWeight,
    pack_cpu,
    packed_linear,
    packed_rows,
)

__all__ = [
    "CpuPackedWeight",
    "fp8_linear",
    "gated_linear",
    "int8_linear",
    "linear",
    "pack_cpu",
    "packed",
    "packed_linear",
    "packed_rows",
]
