"""How DeepSeek V2, V3 and R1 read `config.json`: latent attention, grouped routing, MTP layers."""

from dataclasses import dataclass
from functools import partial

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.types.model_spec import LatentSpec, MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Where a file says nothing."""

    num_dense_layers: int
    score: str
    scale: float
    num_shared: int
    num_experts: int
    num_active: int | None
    intermediate_size: int


def _latent(config: Fields) -> LatentSpec:
    q_rank = None
    if config.fields.get("q_lora_rank", 1536) is not None:  # absent and null differ
        q_rank = config.count("q_lora_rank", 1536)
    elif config.flag("attention_bias", False):
        config.refuse("attention_bias", "is not supported for queries without a latent")
    return LatentSpec(
        kv_rank=config.count("kv_lora_rank", 512),
        q_rank=q_rank,
        nope_size=config.count("qk_nope_head_dim", 128),
        rope_size=config.count("qk_rope_head_dim", 64),
        value_size=config.count("v_head_dim", 128),
        is_interleaved=config.flag("rope_interleave", True),
    )


def _moe(defaults: _Experts, config: Fields, num_layers: int) -> MoeSpec:
    num_dense = config.count("first_k_dense_replace", defaults.num_dense_layers, least=0)
    if (every := config.count("moe_layer_freq", 1)) != 1:
        config.refuse("moe_layer_freq", f"is {every}, only 1 is supported")
    score = config.get("scoring_func", defaults.score)
    score = config.one_of("scoring_func", score, (defaults.score,))
    is_corrected = score == "sigmoid"
    methods = ("noaux_tc",) if is_corrected else ("greedy", "group_limited_greedy")
    method = config.one_of("topk_method", config.get("topk_method", methods[0]), methods)
    has_groups = method != "greedy"
    intermediate_size = config.count("moe_intermediate_size", defaults.intermediate_size)
    return MoeSpec(
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        num_experts=config.count("n_routed_experts", defaults.num_experts),
        num_active=config.count("num_experts_per_tok", defaults.num_active),
        intermediate_size=intermediate_size,
        renormalize=is_corrected and config.flag("norm_topk_prob", True),
        score=score,
        scale=config.number("routed_scaling_factor", defaults.scale),
        num_groups=config.count("n_group", 8 if is_corrected else None) if has_groups else 1,
        num_active_groups=(
            config.count("topk_group", 4 if is_corrected else None) if has_groups else 1
        ),
        num_best=2 if is_corrected else 1,
        has_correction=is_corrected,
        shared_intermediate_size=intermediate_size
        * config.count("n_shared_experts", defaults.num_shared, least=0),
    )


_V2_EXPERTS = _Experts(
    num_dense_layers=0,
    score="softmax",
    scale=1.0,
    num_shared=2,
    num_experts=64,
    num_active=None,
    intermediate_size=1407,
)
_V3_EXPERTS = _Experts(
    num_dense_layers=3,
    score="sigmoid",
    scale=2.5,
    num_shared=1,
    num_experts=256,
    num_active=8,
    intermediate_size=2048,
)

FAMILIES = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        max_position=2048,
        num_kv_heads=None,
        bos=1,
        eos=2,
        num_nextn_predict_layers=0,
        latent=_latent,
        moe=partial(_moe, _V2_EXPERTS),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        max_position=4096,
        num_kv_heads=None,
        bos=0,
        eos=1,
        num_nextn_predict_layers=1,
        latent=_latent,
        moe=partial(_moe, _V3_EXPERTS),
    ),
}
