"""How Gemma 2 reads `config.json`."""

from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.models.windows import in_every_second_layer


def _further(config: Fields) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention", False):
        config.refuse("use_bidirectional_attention", "is true, which is not supported")
    return {
        "embedding_scale": config.count("hidden_size") ** 0.5,
        "attention_scale": config.number("query_pre_attn_scalar", 256, above=0.0) ** -0.5,
        "attention_soft_cap": config.optional_number("attn_logit_softcapping", 50.0, above=0.0),
        "logit_soft_cap": config.optional_number("final_logit_softcapping", 30.0, above=0.0),
    }


FAMILIES = {
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        vocab_size=256000,
        max_position=8192,
        num_heads=8,
        num_kv_heads=4,
        head_size=256,
        bos=2,
        eos=1,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        tie_embeddings=True,
        zero_centered_norms=True,
        sandwich_norms=True,
        windows=in_every_second_layer(default=4096),
        further=_further,
    ),
}
