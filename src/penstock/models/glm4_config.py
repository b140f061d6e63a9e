"""How GLM-4 reads `config.json`: that of 2024 (glm) and that of 2025-04 (glm4)."""

from dataclasses import replace

from penstock.models.family import Family

_GLM = Family(
    architecture="GlmForCausalLM",
    vocab_size=151552,
    max_position=131072,
    num_heads=32,
    num_kv_heads=2,
    head_size=128,
    attention_bias=True,
    reads_qkv_bias=False,
    out_bias=False,
    rotated=0.5,
    norm_eps=1.5625e-7,
)
FAMILIES = {
    "glm": _GLM,
    "glm4": replace(_GLM, architecture="Glm4ForCausalLM", sandwich_norms=True),
}
