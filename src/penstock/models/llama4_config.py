"""How Llama 4 reads `config.json`: the text part of a model of text and images, too.

Layers with rotated heads see chunks, the others everything. Windows of the spec are these chunks.
"""

from dataclasses import replace
from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.models.windows import Windows
from penstock.types.model_spec import MoeSpec, QueryGrowth


def _chunks(config: Fields, num_layers: int) -> Windows:
    chunk = config.count("attention_chunk_size", 8192)
    is_rotated = config.counts("no_rope_layers")  # its name says the opposite
    if not is_rotated:
        every = config.count("no_rope_layer_interval", 4)
        is_rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if len(is_rotated) < num_layers or not {0, 1}.issuperset(is_rotated):
        config.refuse("no_rope_layers", f"must be 0 or 1 for each of {num_layers} layers")
    windows = tuple(chunk if rotated else None for rotated in is_rotated[:num_layers])
    names = ["full_attention" if window is None else "chunked_attention" for window in windows]
    if (kinds := config.texts("layer_types")) is not None and kinds != names:
        config.refuse("layer_types", "other chunks than those of rotated layers are not supported")
    return windows


def _moe(config: Fields, num_layers: int) -> MoeSpec:
    num_active = config.count("num_experts_per_tok", 1)
    if num_active != 1:
        config.refuse("num_experts_per_tok", f"is {num_active}, only 1 is supported")
    step = config.count("interleave_moe_layer_step", 1)
    listed = config.counts("moe_layers") if config.get("moe_layers") is not None else None
    sparse = set(range(step - 1, num_layers, step) if listed is None else listed)
    intermediate_size = config.count("intermediate_size", 8192)
    return MoeSpec(
        layers=tuple(layer in sparse for layer in range(num_layers)),
        num_experts=config.count("num_local_experts", 16, most=1 << 16),
        num_active=num_active,
        intermediate_size=intermediate_size,
        score="sigmoid",
        shared_intermediate_size=intermediate_size,
        scales_inputs=True,
    )


def _further(config: Fields) -> dict[str, Any]:
    growth = QueryGrowth(
        factor=config.number("attn_scale", 0.1), interval=config.count("floor_scale", 8192)
    )
    return {
        "intermediate_size": config.count("intermediate_size_mlp", 16384),
        "has_chunks": True,
        "qk_norm": config.flag("use_qk_norm", True),
        "query_growth": growth if config.flag("attn_temperature_tuning", True) else None,
    }


_TEXT = Family(
    architecture="Llama4ForCausalLM",
    vocab_size=202048,
    max_position=131072,
    num_heads=40,
    num_kv_heads=8,
    head_size=128,
    bos=1,
    eos=2,
    norm_eps=1e-5,
    rope={"rope_theta": 5e5},
    rotates_windows_only=True,
    windows=_chunks,
    moe=_moe,
    further=_further,
)
FAMILIES = {
    "llama4": replace(_TEXT, architecture="Llama4ForConditionalGeneration"),
    "llama4_text": _TEXT,
}
