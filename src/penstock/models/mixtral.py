"""Mixtral: Llama's block with a mixture of experts instead of the MLP."""

from penstock.kernels.moe import Routing
from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.moe import MoE
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
        assert spec.moe is not None
        attention = Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            rope=rope,
            build=build,
            window=spec.window_of(layer),
        )
        mlp = MoE(
            spec.hidden_size,
            spec.moe.num_experts,
            spec.moe.inner_size,
            routing=Routing(num_active=spec.moe.num_active, renormalize=spec.moe.renormalize),
            build=build,
        )
        return DecoderBlock(spec, build, attention=attention, mlp=mlp)
