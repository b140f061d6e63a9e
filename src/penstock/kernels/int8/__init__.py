"""Whole numbers of 8 bits: making them (`quantize_int8`), multiplying them (`int8_linear`)."""

from penstock.kernels.int8.reference import int8_linear, quantize_int8

__all__ = ["int8_linear", "quantize_int8"]
