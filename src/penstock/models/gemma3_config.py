"""How Gemma 3 reads `config.json`: the text part of a model of text and images, too."""

from dataclasses import replace
from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.models.windows import in_all_but_every_nth_layer


def _further(config: Fields) -> dict[str, Any]:
    for name in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if config.get(name):
            config.refuse(name, f"is {config.get(name)!r:.40}, which is not supported")
    return {
        "embedding_scale": config.count("hidden_size") ** 0.5,
        "attention_scale": config.number("query_pre_attn_scalar", 256, above=0.0) ** -0.5,
        "logit_soft_cap": config.optional_number("final_logit_softcapping", above=0.0),
    }


_TEXT = Family(
    architecture="Gemma3ForCausalLM",
    vocab_size=262208,
    max_position=131072,
    num_heads=8,
    num_kv_heads=4,
    head_size=256,
    bos=2,
    eos=1,
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    tie_embeddings=True,
    qk_norm=True,
    zero_centered_norms=True,
    sandwich_norms=True,
    rope={"rope_theta": 1e6},
    window_theta=1e4,
    windows=in_all_but_every_nth_layer("sliding_window_pattern", n=6, default=4096),
    further=_further,
)
FAMILIES = {
    "gemma3": replace(_TEXT, architecture="Gemma3ForConditionalGeneration"),
    "gemma3_text": _TEXT,
}
