"""`AttentionBackend`: what a model's attention layers call. Backends are found by name.

Legend: T tokens in the step, H query heads, K kv heads, D head size, B blocks, S tokens per block.
"""

import importlib
from typing import Protocol, cast

from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the cache, then attends causally over the cache."""

    name: str
    graph_safe: bool  # may be captured in a CUDA graph: the host never looks at device values

    def run(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache_BKSD: Tensor,
        v_cache_BKSD: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """out_THD, contiguous. A query at position p sees keys max(0, p - window + 1) .. p."""
        ...


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
