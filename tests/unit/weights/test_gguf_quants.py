"""Codes of GGUF blocks against the gguf package's own unpacking, and what is packed of them."""

import gguf
import numpy as np
import pytest
import torch

from penstock.kernels.gemm.quantized_cpu import FORMS, Form, pack_cpu, unpack_cpu
from penstock.weights.gguf_quants import _READERS, quantized_rows

HALVES = {  # where a block keeps fp16 numbers; random bytes there could be NaN
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
FORM = {
    "Q4_0": FORMS[0], "Q4_1": FORMS[0], "Q4_K": FORMS[1], "Q5_0": FORMS[2], "Q5_1": FORMS[2],
    "Q8_0": FORMS[2], "Q2_K": FORMS[3], "Q3_K": FORMS[3], "Q5_K": FORMS[3], "Q6_K": FORMS[3],
}  # fmt: skip


def random_lines(name: str, num_rows: int, num_values: int) -> np.ndarray:
    generator = np.random.default_rng(len(name) + num_rows)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = generator.integers(0, 256, (num_rows, num_values // values, size), np.uint8)
    for at in HALVES[name]:
        halves = generator.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def test_every_type_that_is_read_is_tested() -> None:
    assert {kind.name for kind in _READERS} == set(HALVES)


@pytest.mark.parametrize("name", HALVES)
def test_packed_weights_are_the_unpacked_weights(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    lines = random_lines(name, 20, 512)
    expected = torch.from_numpy(gguf.dequantize(lines, kind))

    codes = quantized_rows(lines, kind)
    weight = pack_cpu([codes])

    assert weight.form == FORM[name]
    torch.testing.assert_close(unpack_cpu(weight), expected, atol=0, rtol=0)


def test_a_type_with_a_table_has_no_codes() -> None:
    lines = np.zeros((2, 18), np.uint8)
    assert quantized_rows(lines, gguf.GGMLQuantizationType.IQ4_NL) is None
    assert quantized_rows(lines, gguf.GGMLQuantizationType.F16) is None


def test_parts_of_different_types_share_the_wider_form() -> None:
    kinds = ("Q4_1", "Q8_0", "Q6_K")
    lines = [random_lines(name, 10, 256) for name in kinds]
    parts = [
        quantized_rows(line, gguf.GGMLQuantizationType[name])
        for line, name in zip(lines, kinds, strict=True)
    ]
    expected = [
        torch.from_numpy(gguf.dequantize(line, gguf.GGMLQuantizationType[name]))
        for line, name in zip(lines, kinds, strict=True)
    ]
    assert pack_cpu(parts[:2]).form == Form(8, 32, torch.float16)
    weight = pack_cpu(parts, out_features=40)
    assert weight.form == Form(8, 16, torch.float32)
    expected = torch.cat((*expected, torch.zeros(10, 256)))
    torch.testing.assert_close(unpack_cpu(weight), expected, atol=0, rtol=0)
