"""HF architecture name -> the class that runs it. Model files (and torch) are imported late."""

import importlib
from typing import TYPE_CHECKING, cast

from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Target

if TYPE_CHECKING:
    import torch

    from penstock.kernels.attention.backend import AttentionBackend
    from penstock.layers.build import ExpertsBuild
    from penstock.layers.decoder import Decoder
    from penstock.parallel.mesh import RankMesh
    from penstock.quant.choose import Schemes

_MODELS = {
    "DeepseekV2ForCausalLM": "penstock.models.deepseek_v3:DeepseekForCausalLM",
    "DeepseekV3ForCausalLM": "penstock.models.deepseek_v3:DeepseekForCausalLM",
    "GptOssForCausalLM": "penstock.models.gpt_oss:GptOssForCausalLM",
    "LlamaForCausalLM": "penstock.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "penstock.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "penstock.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "penstock.models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "penstock.models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "penstock.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "penstock.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "penstock.models.qwen3_next:Qwen3NextForCausalLM",
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODELS)


def build_model(
    spec: ModelSpec,
    mesh: "RankMesh",
    dtype: "torch.dtype",
    device: "torch.device",
    attention: "AttentionBackend",
    schemes: "Schemes | None" = None,
    cache_dtype: "torch.dtype | None" = None,
    experts: "ExpertsBuild | None" = None,
) -> "Decoder":
    """This rank's share of the model, its parameters on `device` and not yet filled.

    Without `schemes` weights are kept as the checkpoint does; without `cache_dtype` the cache has
    the model's.
    """
    from penstock.layers.build import Build, ExpertsBuild
    from penstock.layers.linear import Linear
    from penstock.layers.moe import Experts
    from penstock.quant.choose import choose_schemes

    schemes = schemes or choose_schemes(spec.quantization, None, dtype, device)
    build = Build(
        mesh=mesh,
        dtype=dtype,
        device=device,
        cache_dtype=cache_dtype or dtype,
        tables=schemes.tables,
        attention=attention,
        experts=experts or ExpertsBuild(),
    )
    module, _, name = _MODELS[spec.architecture].partition(":")
    model = cast("Decoder", getattr(importlib.import_module(module), name)(spec, build).eval())
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            parts = range(len(layer.shape.outputs))
            sources = [model.weight_rules.source(Target(name, part)) for part in parts]
            layer.use(schemes.linear(sources))
        elif isinstance(layer, Experts):
            parts = range(2 * layer.num_experts)
            sources = [model.weight_rules.source(Target(f"{name}.gate_up", p)) for p in parts]
            layer.use(schemes.experts(sources))
    return model
