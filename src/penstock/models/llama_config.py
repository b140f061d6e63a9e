"""How Llama and Mistral read `config.json`."""

from penstock.models.family import Family
from penstock.models.windows import in_every_layer

FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        max_position=2048,
        num_kv_heads=None,
        bos=1,
        eos=2,
        mlp_bias=None,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        bos=1,
        eos=2,
        qkv_bias=False,
        out_bias=False,
        windows=in_every_layer(default=4096),
    ),
}
