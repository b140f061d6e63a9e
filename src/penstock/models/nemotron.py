"""Nemotron-4 and Minitron: layer norms with a bias, half of a head rotated, and an MLP without a
gate, whose activation is a squared ReLU."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import Decoder
from penstock.layers.mlp import SquaredReluMLP
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, fuse, rules


class NemotronForCausalLM(Decoder):
    weight_rules = DECODER_NAMES + rules(fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")))

    def mlp(self, spec: ModelSpec, layer: int, build: LayerContext) -> SquaredReluMLP:
        return SquaredReluMLP(
            spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, build=build
        )
