"""The device the ops run on: a GPU if there is one, else the CPU and Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def e4m3_in_the_interpreter() -> Iterator[None]:
    """Triton's interpreter loses the carry when it rounds to E4M3, and `tl.dot_scaled` takes the
    scales of NVFP4, which are E4M3, for exponents of two. Here torch does both."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")
    convert, read_scale = interpreter._convert_float, interpreter._dot_scaled_scale_to_f32

    def convert_with_torch(x: Any, source: Any, target: Any, *args: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(x, source, target, *args)

    def read_with_torch(scale: Any, *args: Any) -> Any:
        if scale.dtype == tl.float8e4nv:
            codes = torch.from_numpy(np.ascontiguousarray(scale.data))
            return codes.view(torch.float8_e4m3fn).float().numpy()
        return read_scale(scale, *args)

    interpreter._convert_float = convert_with_torch
    interpreter._dot_scaled_scale_to_f32 = read_with_torch
    yield
    interpreter._convert_float, interpreter._dot_scaled_scale_to_f32 = convert, read_scale
