"""Mixtral: Llama's block with a mixture of experts instead of the MLP."""

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.moe import experts_or_mlp
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, MOE_NAMES, fuse, rename, rules, stack

WEIGHTS = (
    DECODER_NAMES
    + rules(rename("block_sparse_moe", "mlp"))
    + MOE_NAMES
    + rules(
        stack("mlp.experts", "gate_up", ("w1", "w3")),
        stack("mlp.experts", "down", ("w2",)),
        fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    )
)


class MixtralForCausalLM(Decoder):
    weight_rules = WEIGHTS

    def block(self, spec: ModelSpec, layer: int, rope: Rope, build: Build) -> DecoderBlock:
        attention = Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            rope=rope,
            build=build,
            window=spec.window_of(layer),
        )
        mlp = experts_or_mlp(spec, layer, build)
        return DecoderBlock(spec, build, attention=attention, mlp=mlp)
