"""Gemma 3: as Gemma 2 with normalized queries and keys and without caps; five layers with a window
and a rotary embedding of their own, then one without."""

from penstock.layers.decoder import GEMMA_WEIGHTS, Decoder
from penstock.weights.mapping import TEXT_NAMES


class Gemma3ForCausalLM(Decoder):
    """Plain: what differs is in the spec (`gemma3_config.py`)."""

    weight_rules = GEMMA_WEIGHTS


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a checkpoint for text and images."""

    weight_rules = TEXT_NAMES + Gemma3ForCausalLM.weight_rules
