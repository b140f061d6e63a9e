"""Qwen 3 Next: gated delta nets, every fourth layer gated attention; many small experts behind."""

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.cached import CachedLayer
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.delta_net import GatedDeltaNet
from penstock.layers.moe import experts_or_mlp
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import (
    DECODER_NAMES,
    MOE_NAMES,
    fuse,
    rename,
    rules,
    skip_module,
)

_DELTA_PARTS = ("in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias", "out_proj")

WEIGHTS = (
    rules(
        skip_module("mtp"),  # predicts more than one token
        *(rename(f"linear_attn.{part}", f"self_attn.{part}") for part in _DELTA_PARTS),
        rename("linear_attn.norm", "self_attn.out_norm"),
    )
    + DECODER_NAMES
    + MOE_NAMES
    + rules(
        fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        fuse("gate_up_proj", ("gate_proj", "up_proj")),
    )
)


class Qwen3NextForCausalLM(Decoder):
    weight_rules = WEIGHTS

    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> DecoderBlock:
        mixer, mlp = self._mixer(spec, layer, rope, build), experts_or_mlp(spec, layer, build)
        return DecoderBlock(spec, build, attention=mixer, mlp=mlp)

    def _mixer(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> CachedLayer:
        assert spec.delta is not None
        if spec.delta.layers[layer]:
            return GatedDeltaNet(spec.hidden_size, spec.delta, norm_eps=spec.norm_eps, build=build)
        return Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            rope=rope,
            build=build,
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_out_bias,
            qk_norm_eps=spec.norm_eps,
            gated=True,
            zero_centred_norms=spec.zero_centred_norms,
        )
