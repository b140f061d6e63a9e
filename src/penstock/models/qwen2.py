"""Qwen 2 and 2.5: Llama's block with a bias on query, key and value, windows in upper layers."""

from penstock.layers.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Plain: what differs is in the spec (`qwen2_config.py`)."""
