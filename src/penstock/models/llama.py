"""Llama 2 and 3: rotary grouped-query attention and a gated MLP. Mistral adds a window."""

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.mlp import GatedMLP
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, fuse, rules, skip

WEIGHTS = DECODER_NAMES + rules(
    fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    fuse("gate_up_proj", ("gate_proj", "up_proj")),
    skip("rotary_emb.inv_freq"),  # kept by old converters; it follows from the config
)


class LlamaForCausalLM(Decoder):
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
            window=spec.window_of(layer),
        )
        mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, build=build)
        return DecoderBlock(spec, build, attention=attention, mlp=mlp)
