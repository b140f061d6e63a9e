"""Sizes of grids and blocks, on the host: Triton's functions of these names cost 5 us a call."""


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
