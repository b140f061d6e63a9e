"""How Qwen 3, dense, reads `config.json`."""

from penstock.models.family import Family
from penstock.models.windows import in_upper_layers_if_used

FAMILIES = {
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        head_size=128,
        qk_norm=True,
        windows=in_upper_layers_if_used,
    ),
}
