"""Eagle3: a small head that drafts for another model, from hidden states of three of its layers.

Its checkpoint is a folder of its own. At token t it reads those hidden states, made one by `fc`,
beside the embedding of token t + 1; its own output matrix may know a part of the vocabulary alone.
"""

# T tokens in the step, N rows, D hidden size, E hidden sizes of the layers read, C a draft's ids

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.hub.files import read_json
from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.attention import Attention
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks
from penstock.layers.decoder import grouped_query_attention
from penstock.layers.embedding import VocabEmbedding, VocabHead
from penstock.layers.fused_quant import converted
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP
from penstock.layers.moe import experts_or_mlp
from penstock.layers.norm import ResidualNorm, RMSNorm
from penstock.layers.rope import Rope
from penstock.layers.token_exchange import TokenExchange
from penstock.models.spec import parse_model_spec
from penstock.parallel.shard import whole
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import fuse, rename, rename_some, rules, skip, skip_module
from penstock.weights.stream import stream, weight_files

NUM_CAPTURED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    model: ModelSpec  # of its one layer
    num_draft_ids: int  # tokens that it can draft


def parse_eagle3_spec(folder: Path) -> Eagle3Spec:
    as_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    spec = parse_model_spec(folder, as_llama)
    given = read_json(folder / "config.json").get("draft_vocab_size")
    if given is not None and (not isinstance(given, int) or not 0 < given <= spec.vocab_size):
        raise ConfigError(f"draft_vocab_size of '{folder}' is {given!r}, which is no vocabulary")
    if spec.num_layers != 1:
        raise ConfigError(
            f"the Eagle3 head in '{folder}' has {spec.num_layers} layers; heads of one layer run"
        )
    return Eagle3Spec(model=spec, num_draft_ids=given or spec.vocab_size)


class _Block(nn.Module):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.norm_eps
        rope = Rope(spec.rope, spec.head_size, spec.max_position, build.device, build.num_positions)
        self.embed_norm = RMSNorm(size, eps, build)
        self.hidden_norm = RMSNorm(size, eps, build)
        self.attention: Attention = grouped_query_attention(spec, 0, rope, build, in_size=2 * size)
        self.post_norm = ResidualNorm(size, eps, build)
        self.mlp = experts_or_mlp(spec, 0, build)
        assert isinstance(self.mlp, GatedMLP)
        self.exchange = TokenExchange(build)
        self.context = ContextRanks(build)

    def forward(
        self, embedding_TD: Tensor, hidden_TD: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        embedding_TD, hidden_TD = (self.context.own(x, batch) for x in (embedding_TD, hidden_TD))
        both = torch.cat((self.embed_norm(embedding_TD), self.hidden_norm(hidden_TD)), dim=-1)
        wanted = self.attention.input_format(both.shape[0])
        x_TD = self.attention(converted(both, wanted), batch)
        wanted = self.mlp.input_format(self.exchange.num_tokens(batch))
        x, residual_TD = self.post_norm(x_TD, hidden_TD, self.exchange.sent_as(wanted, batch))
        x = self.exchange.gather(x, wanted, batch)
        return self.exchange.scatter(self.mlp(x, batch), batch), residual_TD


class Eagle3Head(nn.Module):
    weight_rules = rules(
        skip("t2d"),
        skip("d2t"),  # read by `read_targets`
        skip_module("embed_tokens"),  # the model's own
        rename_some("layers.0", "midlayer"),
        rename("midlayer.input_layernorm", "midlayer.embed_norm"),
        rename("midlayer.post_attention_layernorm", "midlayer.post_norm"),
        rename("midlayer.self_attn", "midlayer.attention"),
        rename("norm", "final_norm"),
        rename("lm_head", "head"),
        fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        fuse("gate_up_proj", ("gate_proj", "up_proj")),
    )

    def __init__(self, spec: Eagle3Spec, build: LayerContext) -> None:
        super().__init__()
        size = spec.model.hidden_size
        self.hidden_size, self.read_size = size, NUM_CAPTURED * size
        self.num_layers = spec.model.num_layers
        self.fc = Linear((whole(size),), whole(NUM_CAPTURED * size), bias=False, build=build)
        self.midlayer = _Block(spec.model, build)
        self.final_norm = ResidualNorm(size, spec.model.norm_eps, build)
        self.head = VocabHead(VocabEmbedding(spec.num_draft_ids, size, build))
        self.targets_C = torch.arange(spec.num_draft_ids, device=build.device)

    def prepared(self, hidden_TE: Tensor, batch: ForwardBatch) -> Tensor:
        wanted = self.fc.input_format(batch.num_tokens)
        return self.fc(converted(hidden_TE, wanted), batch)

    def forward(
        self, embedding_TD: Tensor, hidden_TD: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.midlayer(embedding_TD, hidden_TD, batch)
        normed_TD, sum_TD = self.final_norm(x_TD, residual_TD)
        context = self.midlayer.context
        return context.all(normed_TD, batch), context.all(sum_TD, batch)

    def best(self, x_ND: Tensor) -> Tensor:
        return self.targets_C[self.head(x_ND).argmax(-1)]

    def read_targets(self, folder: Path) -> None:
        """Which token each of its ids stands for: the file has what is added to the id."""
        for tensor in stream(weight_files(folder)):
            if tensor.name == "d2t":
                if tensor.shape != tuple(self.targets_C.shape):
                    raise ConfigError(f"d2t of '{folder}' does not fit its draft_vocab_size")
                self.targets_C += tensor.read((slice(None),)).to(self.targets_C)
