"""How Qwen 3 Next reads `config.json`: gated delta nets, partly rotated heads."""

from penstock.models.family import Family, experts
from penstock.models.fields import Fields
from penstock.types.model_spec import DeltaSpec


def _delta(config: Fields, num_layers: int) -> DeltaSpec:
    interval = config.count("full_attention_interval", 4)
    kinds = config.texts("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    known = {"linear_attention", "full_attention"}
    if len(kinds) != num_layers or set(kinds) != known:
        config.refuse(
            "layer_types",
            f"is {kinds}, it must name {num_layers} layers, some linear_attention and some "
            "full_attention",
        )
    num_key_heads = config.count("linear_num_key_heads", 16)
    num_value_heads = config.count("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        config.refuse(
            "linear_num_value_heads",
            f"{num_value_heads} is no multiple of {num_key_heads} key heads",
        )
    return DeltaSpec(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=config.count("linear_key_head_dim", 128),
        value_size=config.count("linear_value_head_dim", 128),
        conv_width=config.count("linear_conv_kernel_dim", 4, least=2),
    )


FAMILIES = {
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        num_kv_heads=2,
        head_size=256,
        qk_norm=True,
        rotated=0.25,
        zero_centered_norms=True,
        num_nextn_predict_layers=1,
        delta=_delta,
        moe=experts(
            num_experts=512,
            num_active=10,
            intermediate_size=512,
            shared_intermediate_size=512,
            norm_topk=True,
        ),
    ),
}
