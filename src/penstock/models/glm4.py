"""GLM-4: Llama's block; channels 2i and 2i + 1 of the first half of a head are rotated together.
Since 2025-04 what each part gives is normalized, too."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import DECODER_WEIGHTS, Decoder
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import pair, rename, rules, unfuse


class Glm4ForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        num_rotated = int(spec.head_size * spec.rope.partial_factor)
        self.weight_rules = (
            rules(
                pair("q_proj", spec.num_heads, spec.head_size, num_rotated),
                pair("k_proj", spec.num_kv_heads, spec.head_size, num_rotated),
                unfuse("gate_up_proj", ("gate_proj", "up_proj"), (spec.intermediate_size,) * 2),
                rename("post_self_attn_layernorm", "attention_out_norm"),
                rename("post_mlp_layernorm", "mlp_out_norm"),
            )
            + DECODER_WEIGHTS
        )
