"""The frame most language models share: embedding, pre-norm residual blocks, final norm, head.

What makes an architecture is the attention and the MLP that its file puts into the blocks.
"""

# T tokens in the step, L rows that need logits, D hidden size, V vocabulary

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from penstock.kernels.batch import ForwardBatch
from penstock.layers.build import Build
from penstock.layers.cached import CachedLayer
from penstock.layers.embedding import VocabEmbedding, VocabHead
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP
from penstock.layers.moe import Experts, MoE, Router
from penstock.layers.norm import ResidualNorm, RMSNorm
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Rules


class DecoderBlock(nn.Module):
    def __init__(
        self, spec: ModelSpec, build: Build, *, attention: CachedLayer, mlp: GatedMLP | MoE
    ) -> None:
        super().__init__()
        self.input_norm = _norm(spec, build)
        self.attention = attention
        self.post_norm = _norm(spec, build)
        self.mlp = mlp

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        wanted = self.attention.input_format(batch.num_tokens)
        x_TD, residual_TD = self.input_norm(x_TD, residual_TD, wanted)
        x_TD = self.attention(x_TD, batch)
        wanted = self.mlp.input_format(batch.num_tokens)
        x_TD, residual_TD = self.post_norm(x_TD, residual_TD, wanted)
        return self.mlp(x_TD, batch), residual_TD


def _norm(spec: ModelSpec, build: Build) -> ResidualNorm:
    return ResidualNorm(
        spec.hidden_size, spec.norm_eps, build, zero_centred=spec.zero_centred_norms
    )


def _kind(block: DecoderBlock) -> tuple[Any, ...]:
    """Blocks with the same one run the same kernels."""
    parameters = tuple((one.shape, one.dtype) for one in block.parameters())
    return type(block.attention), block.attention.cache_spec(), type(block.mlp), parameters


class Decoder(nn.Module, ABC):
    """An architecture is a subclass that says what a block is made of, and its weights' names."""

    weight_rules: Rules

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        rope = Rope(spec.rope, spec.head_size, spec.max_position, build.device)
        self.embed = VocabEmbedding(spec.vocab_size, spec.hidden_size, build)
        self.layers = nn.ModuleList(
            self.block(spec, layer, rope, build) for layer in range(spec.num_layers)
        )
        self.norm = _norm(spec, build)
        table = self.embed
        if not spec.tie_embeddings:
            table = VocabEmbedding(spec.vocab_size, spec.hidden_size, build)
        self.head = VocabHead(table)

    @abstractmethod
    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> DecoderBlock: ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of every token of the step, after the final norm."""
        x_TD, residual_TD = self.embed(batch.input_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, batch)
        x_TD, _ = self.norm(x_TD, residual_TD)
        return x_TD

    def logits(self, x_LD: Tensor) -> Tensor:
        """Logits of the whole vocabulary, in the model's dtype, on every rank."""
        return self.head(x_LD)

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """With one layer of each kind alone: enough to try what all others do alike."""
        layers = self.layers
        kinds = {_kind(block): block for block in cast(Iterable[DecoderBlock], reversed(layers))}
        self.layers = nn.ModuleList(reversed(kinds.values()))
        try:
            yield
        finally:
            self.layers = layers

    def finish(self) -> None:
        """After loading: every layer brings its weights into the form it computes with."""
        kinds = CachedLayer | Experts | Linear | RMSNorm | Router | VocabEmbedding | VocabHead
        for module in self.modules():
            if isinstance(module, kinds):
                module.finish()

    def cache_layers(self) -> list[CachedLayer]:
        """The layers that need a cache, in order."""
        return [layer for layer in self.modules() if isinstance(layer, CachedLayer)]
