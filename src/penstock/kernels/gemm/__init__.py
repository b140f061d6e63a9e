"""Products with weights that stay: `linear` with plain ones, `packed_linear` with small codes, and
`gated_linear` for a few tokens that go through a gate."""

from penstock.kernels.gemm.codes import Codes, PackedWeight, pack, packed_linear, packed_rows
from penstock.kernels.gemm.dense import linear, packed
from penstock.kernels.gemm.few import gated_linear

__all__ = [
    "Codes",
    "PackedWeight",
    "gated_linear",
    "linear",
    "pack",
    "packed",
    "packed_linear",
    "packed_rows",
]
