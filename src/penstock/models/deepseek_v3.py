"""DeepSeek V2, V3 and R1: latent attention; after the first layers, experts beside shared ones."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import Decoder
from penstock.layers.mla import LatentAttention
from penstock.layers.mtp import layer_names
from penstock.layers.rope import Rope, score_factor
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import (
    DECODER_NAMES,
    MOE_NAMES,
    Rules,
    fuse,
    rename,
    rules,
    skip,
)


def weight_rules(spec: ModelSpec, has_mtp: bool = False) -> Rules:
    assert spec.latent is not None, spec
    queries = "q_proj" if spec.latent.q_rank is None else "q_a_proj"
    return (
        layer_names(spec, has_mtp)
        + DECODER_NAMES
        + MOE_NAMES
        + rules(
            fuse("qkv_a_proj", (queries, "kv_a_proj_with_mqa")),
            rename("mlp.shared_experts", "mlp.shared"),
            rename("q_a_layernorm", "q_norm"),
            rename("kv_a_layernorm", "kv_norm"),
            fuse("gate_up_proj", ("gate_proj", "up_proj")),
            skip("rotary_emb.inv_freq"),  # of old converters; it follows from the config
        )
    )


class DeepseekForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        self.weight_rules = weight_rules(spec, build.has_mtp)

    def attention(
        self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext
    ) -> LatentAttention:
        assert spec.latent is not None, spec
        head_size = spec.latent.nope_size + spec.latent.rope_size
        return LatentAttention(
            spec.hidden_size,
            spec.num_heads,
            spec.latent,
            scale=head_size**-0.5 * score_factor(spec.rope),
            rope=rope,
            build=build,
            bias=spec.attention_bias,
        )
