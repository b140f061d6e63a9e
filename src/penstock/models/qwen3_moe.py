"""Qwen 3 with experts: its dense block, most layers of it with a mixture instead of the MLP."""

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.moe import experts_or_mlp
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, MOE_NAMES, fuse, rules

WEIGHTS = (
    DECODER_NAMES
    + MOE_NAMES
    + rules(
        fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        fuse("gate_up_proj", ("gate_proj", "up_proj")),
    )
)


class Qwen3MoeForCausalLM(Decoder):
    weight_rules = WEIGHTS

    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> DecoderBlock:
        attention = Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            rope=rope,
            build=build,
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_out_bias,
            qk_norm_eps=spec.norm_eps,
            window=spec.window_of(layer),
        )
        mlp = experts_or_mlp(spec, layer, build)
        return DecoderBlock(spec, build, attention=attention, mlp=mlp)
