"""Products with weights of few bits a number and inputs of the model's dtype:
`coded_linear`, and `coded_experts` of layers that have some."""

from penstock.kernels.coded.reference import coded_experts, coded_linear
from penstock.kernels.coded.weights import (
    Coded,
    CodedWeight,
    Kind,
    int8_coded,
    nf4_coded,
    pack_coded,
    random_coded,
    stack_coded,
    unpack_coded,
)

__all__ = [
    "Coded",
    "CodedWeight",
    "Kind",
    "coded_experts",
    "coded_linear",
    "int8_coded",
    "nf4_coded",
    "pack_coded",
    "random_coded",
    "stack_coded",
    "unpack_coded",
]
