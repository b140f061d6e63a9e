"""How GLM-4.5 reads `config.json`."""

from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.types.model_spec import MoeSpec


def _moe(config: Fields, num_layers: int) -> MoeSpec:
    num_dense = config.count("first_k_dense_replace", 1, least=0)
    num_experts = config.count("n_routed_experts", 128)
    num_active = config.count("num_experts_per_tok", 8)
    num_groups, num_active_groups = config.count("n_group", 1), config.count("topk_group", 1)
    if num_active > num_experts:
        config.refuse("num_experts_per_tok", f"is {num_active}, of {num_experts} experts")
    if num_experts % num_groups or num_active_groups > num_groups:
        config.refuse("n_group", f"is {num_groups}, for {num_experts} experts")
    intermediate_size = config.count("moe_intermediate_size", 1408)
    return MoeSpec(
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=intermediate_size,
        renormalize=config.flag("norm_topk_prob", True),
        score="sigmoid",
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        shared_intermediate_size=intermediate_size * config.count("n_shared_experts", 1, least=0),
        has_correction=True,
    )


def _further(config: Fields) -> dict[str, Any]:
    return {"qk_norm": config.flag("use_qk_norm", False)}


FAMILIES = {
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        vocab_size=151552,
        max_position=131072,
        num_heads=96,
        num_kv_heads=8,
        out_bias=False,
        reads_qkv_bias=False,
        rotated=0.5,
        norm_eps=1e-5,
        num_nextn_predict_layers=1,
        moe=_moe,
        further=_further,
    ),
}
