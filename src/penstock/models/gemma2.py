"""Gemma 2: norms before and behind each part, capped scores and logits, windows in every second
layer, GELU in the place of SiLU."""

from penstock.layers.decoder import DECODER_WEIGHTS, SANDWICH_NAMES, Decoder


class Gemma2ForCausalLM(Decoder):
    """Plain: what differs is in the spec (`gemma2_config.py`)."""

    weight_rules = SANDWICH_NAMES + DECODER_WEIGHTS
