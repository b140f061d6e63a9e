"""How Qwen 2 and 2.5 read `config.json`."""

from penstock.models.family import Family
from penstock.models.windows import in_upper_layers_if_used

FAMILIES = {
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        reads_qkv_bias=False,
        out_bias=False,
        windows=in_upper_layers_if_used,
    ),
}
