"""Gemma 2: norms before and behind each part, capped scores and logits, windows in every second
layer, GELU in the place of SiLU."""

from penstock.layers.decoder import GEMMA_WEIGHTS, Decoder


class Gemma2ForCausalLM(Decoder):
    """Plain: what differs is in the spec (`gemma2_config.py`)."""

    weight_rules = GEMMA_WEIGHTS
