"""`AttentionBackend`: what a model's attention layers call. Backends are found by name.

Legend: T tokens in the step, H query heads, K kv heads, D head size (of an NVFP4 cache half of it:
a byte has two codes), B blocks, S tokens per block.
"""

import importlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.quantize import quantize_fp8
from penstock.kernels.quantize.block_scaled import e2m1_values
from penstock.kernels.quantized_weight import FP4_GROUP


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer's attention is, beside its tensors."""

    scale: float  # of the scores; the scale of stored keys is a factor of it
    window: int | None = None  # a query at position p sees keys max(0, p - window + 1) .. p
    v_scale: float = 1.0  # a stored value times this is the value
    has_chunks: bool = False  # sees keys p // window * window .. p instead
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)

    @property
    def is_plain(self) -> bool:
        """Neither chunks nor a cap, which not every kernel knows."""
        return not self.has_chunks and self.soft_cap is None


class CacheScales(NamedTuple):
    """Of a cache of INT8 in float32, [B, K, S]; of NVFP4 in E4M3, [B, K, S, groups of a head]. A
    stored key times its scale is the key, but for the layer's own scale (`AttentionParams`)."""

    keys: Tensor
    values: Tensor

    @property
    def are_nvfp4(self) -> bool:
        return self.keys.dtype is torch.float8_e4m3fn


def cached_values(numbers: Tensor, scales: Tensor | None) -> Tensor:
    """What is stored in a cache, or some of it, stands for, in fp32: [..., D]."""
    if scales is None:
        return numbers.float()
    if scales.dtype is torch.float8_e4m3fn:
        return e2m1_values(numbers) * scales.float().repeat_interleave(FP4_GROUP, dim=-1)
    return numbers.float() * scales.unsqueeze(-1)


class AttentionBackend(Protocol):
    """Attends causally over a cache that holds the step's own keys and values already."""

    name: str
    graph_safe: bool  # may be captured in a CUDA graph: the host never looks at device values

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        params: AttentionParams,
        sinks_H: Tensor | None = None,
        scales: CacheScales | None = None,
        out_scale_1: Tensor | None = None,
    ) -> Tensor:
        """out_THD, contiguous, in q's dtype; zero for padding behind the last chunk. What a query
        does not see is not multiplied, not even by zero: where a window has passed or a sequence
        ends, the cache may hold another's numbers, or NaN.

        `sinks_H` (float32): a score per head that takes its share of the softmax and has no value.
        `out_scale_1`: the output is FP8 with this scale (`quantized_output`).
        """
        ...


def quantized_output(out_THD: Tensor, scale_1: Tensor | None) -> Tensor:
    """With a scale: FP8, to be multiplied by it."""
    if scale_1 is None:
        return out_THD
    return quantize_fp8(out_THD.flatten(1), scale_1, 0)[0].view(out_THD.shape)


_BACKENDS = {
    "reference": "penstock.kernels.attention.reference:ReferenceAttention",
    "sdpa": "penstock.kernels.attention.sdpa:SdpaAttention",
    "triton": "penstock.kernels.attention.triton:TritonAttention",
}


def get_backend(name: str) -> AttentionBackend:
    """A new backend; its scratch memory is its own. The module is imported here, not before."""
    if name not in _BACKENDS:
        raise ConfigError(f"unknown attention backend '{name}'; there are {', '.join(_BACKENDS)}")
    module, _, cls = _BACKENDS[name].partition(":")
    return cast(AttentionBackend, getattr(importlib.import_module(module), cls)())
