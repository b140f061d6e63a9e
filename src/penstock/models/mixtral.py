"""Mixtral: Llama's block with a mixture of experts instead of the MLP."""

from penstock.layers.decoder import Decoder
from penstock.weights.mapping import DECODER_NAMES, MOE_NAMES, fuse, rename, rules, stack


class MixtralForCausalLM(Decoder):
    weight_rules = (
        DECODER_NAMES
        + rules(rename("block_sparse_moe", "mlp"))
        + MOE_NAMES
        + rules(
            stack("mlp.experts", "gate_up", ("w1", "w3")),
            stack("mlp.experts", "down", ("w2",)),
            fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        )
    )
