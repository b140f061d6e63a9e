"""The frame most language models share: embedding, pre-norm residual blocks, final norm, head.

`Decoder` as it is runs a plain model: grouped-query attention and a gated MLP or experts, with what
the spec says of biases, norms and windows. An architecture is a subclass that replaces one of them.
"""

# T tokens in the step, S those of all ranks that share an MLP, L rows that need logits, D hidden
# size, V vocabulary

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.attention import Attention
from penstock.layers.cached import CachedLayer
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks
from penstock.layers.embedding import VocabEmbedding, VocabHead
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP, SquaredReluMLP
from penstock.layers.moe import Experts, MoE, Router, experts_or_mlp
from penstock.layers.mtp import MTPHead
from penstock.layers.norm import ResidualLayerNorm, ResidualNorm, RMSNorm
from penstock.layers.rope import Rope
from penstock.layers.token_exchange import NoExchange, TokenExchange
from penstock.parallel.mesh import RoleGroup
from penstock.parallel.stages import Elsewhere, Stage
from penstock.types.model_spec import ModelSpec, first_of_each
from penstock.weights.mapping import DECODER_NAMES, MOE_NAMES, Rules, fuse, rename, rules

_FUSED = rules(
    fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    fuse("gate_up_proj", ("gate_proj", "up_proj")),
)
DECODER_WEIGHTS = DECODER_NAMES + _FUSED
# Gemma means another norm by one of the usual names.
GEMMA_WEIGHTS = DECODER_WEIGHTS.without(rename("post_attention_layernorm", "post_norm")) + rules(
    rename("post_attention_layernorm", "attention_out_norm"),
    rename("pre_feedforward_layernorm", "post_norm"),
    rename("post_feedforward_layernorm", "mlp_out_norm"),
)
MOE_WEIGHTS = DECODER_NAMES + MOE_NAMES + _FUSED

FeedForward = GatedMLP | SquaredReluMLP | MoE


class DecoderBlock(nn.Module):
    def __init__(
        self, spec: ModelSpec, build: LayerContext, *, attention: CachedLayer, mlp: FeedForward
    ) -> None:
        super().__init__()
        self.input_norm = _norm(spec, build)
        self.attention = attention
        self.post_norm = _norm(spec, build)
        self.mlp = mlp
        sends_tokens = isinstance(mlp, MoE) and mlp.dispatch is not None
        self.exchange = NoExchange() if sends_tokens else TokenExchange(build)
        self.attention_out_norm: RMSNorm | None = None
        self.mlp_out_norm: RMSNorm | None = None
        if spec.sandwich_norms:
            self.attention_out_norm = _out_norm(spec, build)
            self.mlp_out_norm = _out_norm(spec, build)
        # Attention's sum over the ranks is then part of the norm behind it.
        self._summed_in_norm: RoleGroup | None = None
        if isinstance(attention, Attention) and not spec.sandwich_norms:
            output = attention.o_proj
            if output.ranks.one_shot is not None:
                output.is_summed, self._summed_in_norm = False, output.ranks

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        wanted = self.attention.input_format(x_TD.shape[0])
        x_TD, residual_TD = self.input_norm(x_TD, residual_TD, wanted)
        x_TD = self.attention(x_TD, self.exchange.of_attention(batch))
        if self.attention_out_norm is not None:
            x_TD = self.attention_out_norm(x_TD)
        wanted = self.mlp.input_format(self.exchange.num_tokens(batch))
        x_TD, residual_TD = self.post_norm(
            x_TD, residual_TD, self.exchange.sent_as(wanted, batch), self._summed_in_norm
        )
        x_SD = self.exchange.gather(x_TD, wanted, batch)
        x_TD = self.exchange.scatter(self.mlp(x_SD, self.exchange.of_mlp(batch)), batch)
        return x_TD if self.mlp_out_norm is None else self.mlp_out_norm(x_TD), residual_TD


def _norm(spec: ModelSpec, build: LayerContext) -> ResidualNorm:
    kind = ResidualLayerNorm if spec.layer_norms else ResidualNorm
    return kind(spec.hidden_size, spec.norm_eps, build, zero_centered=spec.zero_centered_norms)


def _out_norm(spec: ModelSpec, build: LayerContext) -> RMSNorm:
    return RMSNorm(spec.hidden_size, spec.norm_eps, build, zero_centered=spec.zero_centered_norms)


def _quantized_as(block: nn.Module) -> Hashable:
    """Equal for blocks of one kind whose linear layers have the same schemes."""
    return tuple((one.shape, one.dtype) for one in block.parameters())


def grouped_query_attention(
    spec: ModelSpec, layer: int, rope: Rope, build: LayerContext, **further: Any
) -> Attention:
    """The spec's attention; `further`: what `Attention` has that no spec says, or otherwise."""
    stated: dict[str, Any] = {
        "qkv_bias": spec.attention_bias,
        "out_bias": spec.attention_out_bias,
        "qk_norm_eps": spec.norm_eps if spec.qk_norm else None,
        "window": spec.window_of(layer),
        "has_chunks": spec.has_chunks,
        "scale": spec.attention_scale,
        "soft_cap": spec.attention_soft_cap,
        "zero_centered_norms": spec.zero_centered_norms,
    }
    return Attention(
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        rope=rope,
        build=build,
        **(stated | further),
    )


class Decoder(nn.Module):
    """A subclass may say what its blocks are made of, and what checkpoints call its weights."""

    weight_rules: Rules = DECODER_WEIGHTS

    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__()
        ropes = {
            kind: Rope(kind, spec.head_size, spec.max_position, build.device, build.num_positions)
            for kind in {spec.rope_of(layer): None for layer in range(spec.num_layers)}
        }
        self.num_layers = spec.num_layers
        self.stage = Stage(build.mesh, spec.num_layers)
        self.context = ContextRanks(build)
        self.hidden_states = spec.hidden_size, build.dtype, build.device
        # What other stages have is named here, too, so that names are those of the whole model.
        self.embed = cast(VocabEmbedding, Elsewhere())
        embeds_here = spec.tie_embeddings or build.draft_head_embeds
        if self.stage.is_first or (self.stage.is_last and embeds_here):
            self.embed = VocabEmbedding(spec.vocab_size, spec.hidden_size, build)
        self.layers = nn.ModuleList(
            self.block(spec, layer, ropes[spec.rope_of(layer)], build)
            if layer in self.stage.layers
            else Elsewhere()
            for layer in range(spec.num_layers)
        )
        self._layer_kinds = tuple(map(spec.layer_kind, range(spec.num_layers)))
        self.norm, self.head = cast(ResidualNorm, Elsewhere()), cast(VocabHead, Elsewhere())
        if self.stage.is_last:
            self.norm = _norm(spec, build)
            table = self.embed
            if not spec.tie_embeddings:
                table = VocabEmbedding(spec.vocab_size, spec.hidden_size, build)
            self.head = VocabHead(table)
        # Rounded as the weights are: so the model was trained.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=build.dtype).item()
        self.logit_soft_cap = spec.logit_soft_cap
        # Whose hidden states a drafter reads. It is on the last stage, so the others pass them on.
        self.captured_layers = build.captured_layers
        self._captured_before, self._captured_here = (
            [index for index in sorted({*self.captured_layers}) if index in layers]
            for layers in (range(self.stage.layers.start), self.stage.layers)
        )
        self.draft_head: nn.Module | None = None  # what drafts for this model, if a module does
        if build.has_mtp and not self.stage.is_last:
            self.draft_head = Elsewhere()
        elif build.has_mtp:
            with_head = spec.with_mtp_layer()
            rope = ropes[with_head.rope_of(spec.num_layers)]
            block = self.block(with_head, spec.num_layers, rope, build)
            self.draft_head = MTPHead(spec, build, block)

    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext) -> DecoderBlock:
        attention = self.attention(spec, layer, rope, build)
        return DecoderBlock(spec, build, attention=attention, mlp=self.mlp(spec, layer, build))

    def attention(
        self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext
    ) -> CachedLayer:
        """What mixes the tokens of a layer."""
        return grouped_query_attention(spec, layer, rope, build)

    def mlp(self, spec: ModelSpec, layer: int, build: LayerContext) -> FeedForward:
        return experts_or_mlp(spec, layer, build)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of every token of the step, after the final norm."""
        x_TD, _ = self.captured(batch, is_read=False)
        return x_TD

    def captured(self, batch: ForwardBatch, is_read: bool = True) -> tuple[Tensor, Tensor]:
        """The same, and those behind the captured layers one beside the other, where -1 stands for
        the final norm; where there are none or nobody reads them, the same twice. Of a stage that
        is not the last one: what the next one begins with, of the tokens that this rank has."""
        is_last = self.stage.is_last
        here = self._captured_here if is_read or not is_last else []
        (x_TD, found), residual_TD = self._first(batch), None
        for index, layer in enumerate(self.layers):
            x_TD, residual_TD = layer(x_TD, residual_TD, batch)
            if index in here:
                found[index] = x_TD + residual_TD
        # Of a shortened model the last layer stands for those that are not there.
        missing = [index for index in here if index not in found]
        if missing or not is_last:
            end_TD = x_TD if residual_TD is None else x_TD + residual_TD
            found |= dict.fromkeys(missing, end_TD)
        if not is_last:
            states = [found[index] for index in sorted(found)]
            sent_TE = torch.cat([end_TD, *states], dim=-1) if states else end_TD
            return sent_TE, sent_TE
        x_TD, _ = self.norm(x_TD, residual_TD)
        x_TD = self.context.all(x_TD, batch)
        if not (is_read and self.captured_layers):
            return x_TD, x_TD
        states = [
            x_TD if index < 0 else self.context.all(found[index], batch)
            for index in self.captured_layers
        ]
        return x_TD, torch.cat(states, dim=-1)

    @property
    def received_size(self) -> int:
        """Of a token's hidden states that come from the stage before: what its last layer gives,
        and those behind the captured layers until there."""
        return self.hidden_states[0] * (1 + len(self._captured_before))

    def _first(self, batch: ForwardBatch) -> tuple[Tensor, dict[int, Tensor]]:
        """What the first layer of this stage is given; the captured states of stages before it."""
        if self.stage.is_first:
            return self.context.own(self.embedded(batch.input_ids_T), batch), {}
        assert batch.received_TE is not None
        if not self._captured_before:
            return batch.received_TE, {}
        x_TD, *states = batch.received_TE.split(self.hidden_states[0], dim=-1)
        return x_TD.contiguous(), dict(zip(self._captured_before, states, strict=True))

    def embedded(self, ids_T: Tensor) -> Tensor:
        x_TD = self.embed(ids_T)
        return x_TD if self.embedding_scale == 1.0 else x_TD * self.embedding_scale

    def logits(self, x_LD: Tensor) -> Tensor:
        """Logits of the whole vocabulary, in the model's dtype, on every rank of the last stage;
        the others have none, and give back what they are given."""
        if not self.stage.is_last:
            return x_LD
        logits_LV = self.head(x_LD)
        if (cap := self.logit_soft_cap) is None:
            return logits_LV
        return torch.tanh(logits_LV.float() / cap).mul_(cap).to(logits_LV.dtype)

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Only one layer of each kind for a while: the others run the same kernels. As
        `ModelSpec.shortened`, and layers that a checkpoint quantizes differently are told apart."""
        layers = self.layers
        kinds = zip(self._layer_kinds, map(_quantized_as, layers), strict=True)
        self.layers = nn.ModuleList(layers[index] for index in first_of_each(kinds))
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
