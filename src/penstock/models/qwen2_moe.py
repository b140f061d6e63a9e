"""Qwen 1.5 and 2 with experts: Qwen 2's block, with a mixture and a gated shared expert as MLP."""

from penstock.layers.decoder import MOE_WEIGHTS, Decoder


class Qwen2MoeForCausalLM(Decoder):
    weight_rules = MOE_WEIGHTS
