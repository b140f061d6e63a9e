"""`MTPHead`: one more block that predicts the token behind the next one (multi-token prediction).

At token t it reads the model's hidden state (after the final norm) beside the embedding of token
t + 1; the model's output matrix turns what it gives into logits of token t + 2.
"""

# T tokens in the step, D hidden size

import torch
from torch import Tensor, nn

from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks
from penstock.layers.linear import Linear
from penstock.layers.norm import ResidualNorm, RMSNorm
from penstock.parallel.shard import whole
from penstock.quantization.scheme import LinearScheme
from penstock.quantization.unquantized import Unquantized
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Rules, rename, rules, skip_module


class _PlainLinear(Linear):
    """Whatever the checkpoint quantizes, this layer it does not."""

    def use(self, scheme: LinearScheme) -> None:
        super().use(Unquantized())


class MTPHead(nn.Module):
    def __init__(self, spec: ModelSpec, build: LayerContext, block: nn.Module) -> None:
        super().__init__()
        size, eps, is_centered = spec.hidden_size, spec.norm_eps, spec.zero_centered_norms
        self.hidden_size = self.read_size = size
        self.embed_norm = RMSNorm(size, eps, build, zero_centered=is_centered)
        self.hidden_norm = RMSNorm(size, eps, build, zero_centered=is_centered)
        self.proj = _PlainLinear((whole(size),), whole(2 * size), bias=False, build=build)
        self.block = block
        self.context = ContextRanks(build)
        self.final_norm = ResidualNorm(size, eps, build, zero_centered=is_centered)

    def prepared(self, hidden_TD: Tensor, batch: ForwardBatch) -> Tensor:
        return hidden_TD

    def forward(
        self, embedding_TD: Tensor, hidden_TD: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Hidden states for logits, and for the head itself to go on from: both after its norm.
        The embedding is that of each token's next one."""
        both_TE = torch.cat((self.embed_norm(embedding_TD), self.hidden_norm(hidden_TD)), dim=-1)
        own_TD = self.context.own(self.proj(both_TE, batch), batch)
        own_TD, residual_TD = self.block(own_TD, None, batch)
        own_TD, _ = self.final_norm(own_TD, residual_TD)
        x_TD = self.context.all(own_TD, batch)
        return x_TD, x_TD


def layer_names(spec: ModelSpec, has_head: bool) -> Rules:
    """Where the head is the layer behind the last, as in DeepSeek's and GLM's checkpoints, which
    also hold copies of the embedding and the output matrix. To be said before renaming."""
    first, num_heads = spec.num_layers, spec.num_nextn_predict_layers
    unused = range(first + has_head, first + num_heads)
    skipped = rules(*(skip_module(f"model.layers.{layer}") for layer in unused))
    if not has_head:
        return skipped
    layer = f"model.layers.{first}"
    return skipped + rules(
        skip_module(f"{layer}.embed_tokens"),
        skip_module(f"{layer}.shared_head.head"),
        rename(f"{layer}.enorm", "draft_head.embed_norm"),
        rename(f"{layer}.hnorm", "draft_head.hidden_norm"),
        rename(f"{layer}.eh_proj", "draft_head.proj"),
        rename(f"{layer}.shared_head.norm", "draft_head.final_norm"),
        rename(layer, "draft_head.block"),
    )


def module_names(has_head: bool) -> Rules:
    """Where it is a module of its own, as in Qwen's."""
    if not has_head:
        return rules(skip_module("mtp"))
    return rules(
        rename("mtp.pre_fc_norm_embedding", "draft_head.embed_norm"),
        rename("mtp.pre_fc_norm_hidden", "draft_head.hidden_norm"),
        rename("mtp.fc", "draft_head.proj"),
        rename("mtp.norm", "draft_head.final_norm"),
        rename("mtp.layers.0", "draft_head.block"),
    )
