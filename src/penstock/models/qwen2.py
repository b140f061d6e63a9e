"""Qwen 2 and 2.5: Llama's block with a bias on query, key and value, windows in upper layers."""

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.mlp import GatedMLP
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, fuse, rules

WEIGHTS = DECODER_NAMES + rules(
    fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    fuse("gate_up_proj", ("gate_proj", "up_proj")),
)


class Qwen2ForCausalLM(Decoder):
    weight_rules = WEIGHTS

    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> DecoderBlock:
        attention = Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            rope=rope,
            build=build,
            qkv_bias=True,
            window=spec.window_of(layer),
        )
        mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, bias=False, build=build)
        return DecoderBlock(spec, build, attention=attention, mlp=mlp)
