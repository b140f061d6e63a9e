"""What a step sends to the device in one copy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.input_batch import all_to_device


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_every_array_arrives_whole_and_at_a_multiple_of_16_bytes(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.int32) + 10 * i for i, size in enumerate(sizes)]
    tensors = all_to_device(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    base = tensors[0].untyped_storage().data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in tensors if len(tensor))
