"""How Phi-3 and Phi-4 read `config.json`."""

from penstock.models.family import Family
from penstock.models.windows import in_every_layer

FAMILIES = {
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        vocab_size=32064,
        max_position=4096,
        num_kv_heads=None,
        bos=1,
        eos=32000,
        qkv_bias=False,
        reads_qkv_bias=False,
        out_bias=False,
        rotated=1.0,
        norm_eps=1e-5,
        windows=in_every_layer(default=None),
    ),
}
