"""GEMM with low-bit weights on a CPU: `CpuPackedWeight` is a `QuantizedWeight` as C code reads it.

A weight is scale * code + minimum, with one scale and one minimum per group of inputs. Four bits
are enough for codes 0..15, eight for -128..127; scales and minima are kept in fp16 where that
loses nothing. So the GEMM is the one with the dequantized fp32 weights, accumulated in another
order.

Legend: T rows, I inputs, O outputs, G groups of inputs, N tiles of 16 outputs, W words of a group,
C codes of a word, L the 16 outputs of a tile, B bytes of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.op import native, op
from penstock.kernels.quantized_weight import QuantizedWeight

TILE = 16
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Form:
    bits: int
    group: int
    meta: torch.dtype  # of scales and minima

    @property
    def record_bytes(self) -> int:
        """16 outputs of one group: their scales, their minima, their codes."""
        return 2 * TILE * self.meta.itemsize + TILE * self.group * self.bits // 8


FORMS = (
    Form(4, 32, torch.float16),
    Form(4, 32, torch.float32),
    Form(8, 32, torch.float16),
    Form(8, 16, torch.float32),
)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPackedWeight:
    """A matrix [outputs, inputs]. `gemm.c` says how `data_NGB` is laid out."""

    data_NGB: Tensor  # uint8
    out_features: int
    in_features: int
    form: Form


def pack_cpu(
    weights: Sequence[QuantizedWeight], out_features: int | None = None
) -> CpuPackedWeight | None:
    """The weights one after the other, in the smallest form that holds them all exactly.

    With `out_features`, rows of zeros follow. None where no form fits: groups too small.
    """
    parts = [affine for weight in weights if (affine := weight.as_affine()) is not None]
    form = next((form for form in FORMS if all(_fits(part, form) for part in parts)), None)
    if form is None or len(parts) < len(weights):
        return None
    codes_OI = torch.cat([part.codes_OI for part in parts])
    meta_2OG = torch.cat([_metas(part, form.group) for part in parts], dim=1)
    out_features = out_features or codes_OI.shape[0]
    num_tiles, in_features = -(-out_features // TILE), codes_OI.shape[1]
    padding = (0, 0, 0, num_tiles * TILE - codes_OI.shape[0])
    codes_OI, meta_2OG = F.pad(codes_OI, padding), F.pad(meta_2OG, padding)
    num_groups = in_features // form.group
    meta_NG2L = meta_2OG.to(form.meta).view(2, num_tiles, TILE, num_groups).permute(1, 3, 0, 2)
    codes_NLGWC = codes_OI.view(torch.uint8).view(
        num_tiles, TILE, num_groups, -1, _WORD_BITS // form.bits
    )
    if form.bits == 4:
        low, high = codes_NLGWC.chunk(2, dim=-1)
        codes_NLGWC = low | high << 4  # bytes from here on
    codes_NGWLC = codes_NLGWC.permute(0, 2, 3, 1, 4)
    data_NGB = torch.empty(num_tiles, num_groups, form.record_bytes, dtype=torch.uint8)
    meta_bytes = 2 * TILE * form.meta.itemsize
    data_NGB[..., :meta_bytes] = meta_NG2L.contiguous().view(torch.uint8).flatten(2)
    data_NGB[..., meta_bytes:].view(codes_NGWLC.shape).copy_(codes_NGWLC)
    return CpuPackedWeight(data_NGB, out_features, in_features, form)


def _fits(part: QuantizedWeight, form: Form) -> bool:
    lowest, highest = part.codes_OI.aminmax() if part.codes_OI.numel() else (0, 0)
    if form.bits == 4 and (lowest < 0 or highest > 15):
        return False
    if part.group % form.group or part.codes_OI.shape[1] % form.group:
        return False
    metas_2OG = _metas(part, part.group)
    return torch.equal(metas_2OG, metas_2OG.to(form.meta).float())


def _metas(part: QuantizedWeight, group: int) -> Tensor:
    """Scales and minima, one for every `group` inputs."""
    assert part.minima_OG is not None
    metas_2OG = torch.stack((part.scales_OG, part.minima_OG))
    return metas_2OG.repeat_interleave(part.group // group, dim=2)


def unpack_cpu(weight: CpuPackedWeight) -> Tensor:
    """The fp32 matrix [O, I]."""
    form, data_NGB = weight.form, weight.data_NGB
    num_tiles, num_groups, _ = data_NGB.shape
    meta_bytes = 2 * TILE * form.meta.itemsize
    meta_NG2L = data_NGB[..., :meta_bytes].contiguous().view(form.meta).float()
    scales_NLG1, minima_NLG1 = (
        meta_NG2L.view(num_tiles, num_groups, 2, TILE).permute(2, 0, 3, 1).unsqueeze(-1)
    )
    codes_NGWLC = data_NGB[..., meta_bytes:].reshape(num_tiles, num_groups, -1, TILE, 4)
    if form.bits == 4:
        codes_NGWLC = torch.cat((codes_NGWLC & 15, codes_NGWLC >> 4), dim=-1)
    codes_NLGI = codes_NGWLC.view(torch.int8).permute(0, 3, 1, 2, 4).flatten(3)
    weight_NLGI = scales_NLG1 * codes_NLGI + minima_NLG1
    return weight_NLGI.reshape(-1, weight.in_features)[: weight.out_features]


@op
def packed_linear(x_TI: Tensor, weight: CpuPackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    return F.linear(x_TI, unpack_cpu(weight).to(x_TI.dtype), bias_O)


@op
def packed_rows(ids_T: Tensor, weight: CpuPackedWeight) -> Tensor:
    """Rows of the matrix, fp32: an embedding."""
    return F.embedding(ids_T, unpack_cpu(weight))


@packed_linear.impl(
    "native",
    needs=native(),
    fits=lambda x_TI, weight, bias_O=None: x_TI.dtype is torch.float32 and x_TI.dim() == 2,
)
def packed_linear_native(x_TI, weight, bias_O=None):
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    num_rows = x_TI.shape[0]
    y_TO = x_TI.new_empty((num_rows, weight.out_features))
    if num_rows:
        form = weight.form
        library().packed_linear(  # type: ignore[union-attr]
            x_TI.data_ptr(), x_TI.stride(0), num_rows, weight.data_NGB.data_ptr(),
            0 if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), weight.out_features,
            weight.out_features, weight.in_features, form.bits, form.meta.itemsize,
        )  # fmt: skip
    return y_TO


@packed_rows.impl("native", needs=native())
def packed_rows_native(ids_T, weight):
    ids_T = ids_T.contiguous()
    out_TI = torch.empty(ids_T.shape[0], weight.in_features)
    library().packed_rows(  # type: ignore[union-attr]
        ids_T.data_ptr(), ids_T.shape[0], weight.data_NGB.data_ptr(), out_TI.data_ptr(),
        weight.in_features, weight.out_features, weight.in_features, weight.form.bits,
        weight.form.meta.itemsize,
    )  # fmt: skip
    return out_TI
