"""How Nemotron-4 reads `config.json`."""

from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields


def _further(config: Fields) -> dict[str, Any]:
    return {"norm_eps": config.number("norm_eps", 1e-5, above=0.0), "layer_norms": True}


FAMILIES = {
    "nemotron": Family(
        architecture="NemotronForCausalLM",
        vocab_size=256000,
        max_position=4096,
        num_kv_heads=None,
        bos=2,
        eos=3,
        reads_qkv_bias=False,
        mlp_bias=None,
        activation="relu2",
        rotated=0.5,
        zero_centered_norms=True,
        further=_further,
    ),
}
