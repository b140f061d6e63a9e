"""Building a step's inputs on the device from the rows' own state: `decode_inputs`."""

from penstock.kernels.gather.reference import decode_inputs

__all__ = ["decode_inputs"]
