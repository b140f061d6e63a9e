"""Qwen 3 with experts: its dense block, most layers of it with a mixture instead of the MLP."""

from penstock.layers.decoder import MOE_WEIGHTS, Decoder


class Qwen3MoeForCausalLM(Decoder):
    weight_rules = MOE_WEIGHTS
