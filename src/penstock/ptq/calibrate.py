"""Calibration: runs text through a model and records statistics of its linear layers' inputs.

Only the layers of one block are recorded at a time, so that the statistics stay small; the outputs
of a block lie in host memory.

Legend: T tokens of a text, D hidden size, I inputs of a layer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.decoder import Decoder
from penstock.layers.linear import Linear
from penstock.types.cache_spec import RecurrentState

_BLOCK = 32  # tokens of a cache block


@dataclass(slots=True)
class Inputs:
    """Of one linear layer, over all texts."""

    moments_II: Tensor  # fp32: the mean of x^T x
    mean_I: Tensor  # of |x|
    largest_I: Tensor  # of |x|
    num_tokens: int = 0

    def add(self, x_TI: Tensor) -> None:
        x_TI = x_TI.float()
        total = self.num_tokens + len(x_TI)
        self.moments_II.mul_(self.num_tokens / total).addmm_(x_TI.t(), x_TI, alpha=1 / total)
        self.mean_I.mul_(self.num_tokens / total).add_(x_TI.abs().sum(0), alpha=1 / total)
        self.largest_I.copy_(torch.maximum(self.largest_I, x_TI.abs().amax(0)))
        self.num_tokens = total


class Texts:
    """Token ids in equal pieces, each of which the model reads from its beginning."""

    def __init__(self, model: Decoder, ids: Sequence[int], length: int, device: torch.device):
        pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
        self._model, self._device = model, device
        self._batch = _whole_text(length, device)
        self._ids = [torch.tensor(piece, device=device) for piece in pieces]
        for layer in model.cache_layers():
            _bind(layer, length, device)

    @torch.inference_mode()
    def through_blocks(self) -> Iterator[tuple[int, dict[str, Inputs]]]:
        """Each block's number, and what its linear layers were given, by name within the block."""
        states: list[tuple[Tensor, Tensor | None]]
        states = [(self._model.embed(ids).cpu(), None) for ids in self._ids]
        for number, block in enumerate(self._model.layers):
            inputs = _watch(block)
            for at, ids in enumerate(self._ids):
                x, residual = states[at]
                moved = None if residual is None else residual.to(self._device)
                x, moved = block(x.to(self._device), moved, self._step(ids))
                states[at] = x.cpu(), moved.cpu()
            _unwatch(block)
            yield number, inputs

    @torch.inference_mode()
    def perplexity(self) -> float:
        """Of every token but each piece's first."""
        total, num_tokens = 0.0, 0
        for ids in self._ids:
            logits_TV = self._model.logits(self._model(self._step(ids))).float()
            total += float(F.cross_entropy(logits_TV[:-1], ids[1:], reduction="sum"))
            num_tokens += len(ids) - 1
        return math.exp(total / num_tokens)

    def _step(self, ids_T: Tensor) -> ForwardBatch:
        step = replace(self._batch, input_ids_T=ids_T, plans={})
        step.others = (replace(self._batch.others[0], input_ids_T=ids_T, plans={}),)
        return step


def _whole_text(length: int, device: torch.device) -> ForwardBatch:
    """One sequence from its beginning, its cache in the blocks behind the first."""
    num_blocks = -(-length // _BLOCK)
    positions_T = torch.arange(length, device=device)
    batch = ForwardBatch(
        input_ids_T=positions_T,
        positions_T=positions_T,
        slots_T=positions_T + _BLOCK,
        rows_N=torch.zeros(1, dtype=torch.int32, device=device),
        query_starts_N1=torch.tensor([0, length], dtype=torch.int32, device=device),
        kv_lens_N=torch.tensor([length], dtype=torch.int32, device=device),
        block_table_RM=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        num_decodes=0,
        max_kv_len=length,
        cached_lens=(0,),
    )
    batch.others = (replace(batch, slots_T=torch.ones_like(positions_T)),)
    return batch


def _bind(layer: Any, length: int, device: torch.device) -> None:
    spec = layer.cache_spec()
    has_states = isinstance(spec, RecurrentState)
    num_blocks = 2 if has_states else -(-length // _BLOCK) + 1
    layer.group = int(has_states)
    layer.bind_cache(
        *(
            torch.zeros(
                (num_blocks, *plane.shape), dtype=getattr(torch, plane.dtype), device=device
            )
            for plane in spec.planes(_BLOCK)
        )
    )


def _watch(block: Any) -> dict[str, Inputs]:
    found = {}
    for name, layer in block.named_modules():
        if isinstance(layer, Linear):
            size, device = layer.shape.in_features, layer.device
            found[name] = Inputs(
                torch.zeros((size, size), device=device),
                torch.zeros(size, device=device),
                torch.zeros(size, device=device),
            )
            layer.post_op = _recorder(found[name])
    return found


def _recorder(inputs: Inputs) -> Any:
    def record(x_TI: Tensor, y_TO: Tensor, batch: ForwardBatch) -> Tensor:
        inputs.add(x_TI)
        return y_TO

    return record


def _unwatch(block: Any) -> None:
    for layer in block.modules():
        if isinstance(layer, Linear):
            layer.post_op = None
