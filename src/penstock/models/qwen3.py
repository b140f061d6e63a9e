"""Qwen 3, dense: Llama's block with a norm on each query and key head before the rotation."""

from penstock.layers.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Plain: what differs is in the spec (`qwen3_config.py`)."""
