"""How Qwen 3 with experts reads `config.json`."""

from penstock.models.family import Family, experts
from penstock.models.windows import in_every_layer_if_used

FAMILIES = {
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        num_kv_heads=4,
        qk_norm=True,
        windows=in_every_layer_if_used,
        moe=experts(num_experts=128, num_active=8, intermediate_size=768),
    ),
}
