"""How GPT-OSS reads `config.json`."""

from penstock.models.family import Family, experts
from penstock.models.windows import in_every_second_layer

FAMILIES = {
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        max_position=131072,
        num_kv_heads=8,
        head_size=64,
        attention_bias=True,
        windows=in_every_second_layer(default=128),
        norm_eps=1e-5,
        rope={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        moe=experts(num_experts=128, num_active=4, renormalize=True, gate_limit=7.0),
    ),
}
