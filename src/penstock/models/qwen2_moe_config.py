"""How Qwen 1.5 and 2 with experts read `config.json`."""

from penstock.models.family import Family, experts
from penstock.models.windows import in_alternate_lower_layers_if_used

FAMILIES = {
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        num_kv_heads=16,
        qkv_bias=True,
        out_bias=False,
        windows=in_alternate_lower_layers_if_used,
        moe=experts(
            num_experts=60, num_active=4, intermediate_size=1408, shared_intermediate_size=5632
        ),
    ),
}
