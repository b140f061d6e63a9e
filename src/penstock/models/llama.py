"""Llama 2 and 3: rotary grouped-query attention and a gated MLP. Mistral adds a window."""

from penstock.layers.decoder import DECODER_WEIGHTS, Decoder
from penstock.weights.mapping import rules, skip


class LlamaForCausalLM(Decoder):
    # Old converters keep inv_freq; it follows from the config.
    weight_rules = DECODER_WEIGHTS + rules(skip("rotary_emb.inv_freq"))
