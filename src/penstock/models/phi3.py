"""Phi-3 and Phi-4: Llama's block; checkpoints keep q, k, v and gate, up as one matrix each."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import DECODER_WEIGHTS, Decoder
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import rules, unfuse


class Phi3ForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.weight_rules = (
            rules(
                unfuse("qkv_proj", ("q_proj", "k_proj", "v_proj"), (queries, keys, keys)),
                unfuse("gate_up_proj", ("gate_proj", "up_proj"), (spec.intermediate_size,) * 2),
            )
            + DECODER_WEIGHTS
        )
