"""How Mixtral reads `config.json`."""

from penstock.models.family import Family, experts
from penstock.models.windows import in_every_layer

FAMILIES = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        bos=1,
        eos=2,
        qkv_bias=False,
        reads_qkv_bias=False,
        out_bias=False,
        windows=in_every_layer(default=None),
        moe=experts(num_experts=8, num_active=2, renormalize=True),
    ),
}
