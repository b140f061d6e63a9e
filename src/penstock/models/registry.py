"""Architecture name -> the `Family` that reads its config, and the class that runs it.

Files of models (and torch) are imported late.
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from penstock.models.family import Family
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Target

if TYPE_CHECKING:
    import torch

    from penstock.kernels.attention.backend import AttentionBackend
    from penstock.layers.context import ExpertsContext
    from penstock.layers.decoder import Decoder
    from penstock.parallel.mesh import RankMesh
    from penstock.quantization.choose import Schemes
    from penstock.weights.load import LoadableModel


@dataclass(frozen=True, slots=True)
class _Entry:
    architecture: str
    file: str  # models/FILE.py has the class, models/FILE_config.py the `Family`
    class_name: str


_MODELS = {  # by model type
    "deepseek_v2": _Entry("DeepseekV2ForCausalLM", "deepseek_v3", "DeepseekForCausalLM"),
    "deepseek_v3": _Entry("DeepseekV3ForCausalLM", "deepseek_v3", "DeepseekForCausalLM"),
    "gemma2": _Entry("Gemma2ForCausalLM", "gemma2", "Gemma2ForCausalLM"),
    "gemma3": _Entry("Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForConditionalGeneration"),
    "gemma3_text": _Entry("Gemma3ForCausalLM", "gemma3", "Gemma3ForCausalLM"),
    "glm": _Entry("GlmForCausalLM", "glm4", "Glm4ForCausalLM"),
    "glm4": _Entry("Glm4ForCausalLM", "glm4", "Glm4ForCausalLM"),
    "glm4_moe": _Entry("Glm4MoeForCausalLM", "glm4_moe", "Glm4MoeForCausalLM"),
    "gpt_oss": _Entry("GptOssForCausalLM", "gpt_oss", "GptOssForCausalLM"),
    "llama": _Entry("LlamaForCausalLM", "llama", "LlamaForCausalLM"),
    "llama4": _Entry("Llama4ForConditionalGeneration", "llama4", "Llama4ForConditionalGeneration"),
    "llama4_text": _Entry("Llama4ForCausalLM", "llama4", "Llama4ForCausalLM"),
    "mistral": _Entry("MistralForCausalLM", "llama", "LlamaForCausalLM"),
    "mixtral": _Entry("MixtralForCausalLM", "mixtral", "MixtralForCausalLM"),
    "nemotron": _Entry("NemotronForCausalLM", "nemotron", "NemotronForCausalLM"),
    "phi3": _Entry("Phi3ForCausalLM", "phi3", "Phi3ForCausalLM"),
    "qwen2": _Entry("Qwen2ForCausalLM", "qwen2", "Qwen2ForCausalLM"),
    "qwen2_moe": _Entry("Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": _Entry("Qwen3ForCausalLM", "qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": _Entry("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_next": _Entry("Qwen3NextForCausalLM", "qwen3_next", "Qwen3NextForCausalLM"),
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(entry.architecture for entry in _MODELS.values())


def find_family(architectures: Collection[str], model_type: str) -> Family | None:
    """By the names a config.json gives; by its model type where it names no architecture."""
    for known, entry in _MODELS.items():
        if entry.architecture in architectures or (not architectures and known == model_type):
            module = importlib.import_module(f"penstock.models.{entry.file}_config")
            return cast(Family, module.FAMILIES[known])
    return None


def build_model(
    spec: ModelSpec,
    mesh: "RankMesh",
    dtype: "torch.dtype",
    device: "torch.device",
    attention: "AttentionBackend",
    schemes: "Schemes | None" = None,
    cache_dtype: "torch.dtype | None" = None,
    experts: "ExpertsContext | None" = None,
    num_positions: int | None = None,
    has_mtp: bool = False,
    captured_layers: tuple[int, ...] = (),
    draft_head_embeds: bool = False,
) -> "Decoder":
    """This rank's shard of the model, its parameters on `device` and not yet filled.

    Without `schemes` weights are stored as in the checkpoint; without `cache_dtype` the cache has
    the model's. `num_positions`: how long a sequence may become, if not as the model allows.
    `has_mtp`, `captured_layers`, `draft_head_embeds`: what drafting needs of it, as `LayerContext`
    says.
    """
    from penstock.layers.context import ExpertsContext, LayerContext
    from penstock.quantization.choose import choose_schemes

    schemes = schemes or choose_schemes(spec.quantization, None, dtype, device)
    build = LayerContext(
        mesh=mesh,
        dtype=dtype,
        device=device,
        cache_dtype=cache_dtype or dtype,
        tables=schemes.tables,
        attention=attention,
        experts=experts or ExpertsContext(),
        num_positions=num_positions,
        has_mtp=has_mtp,
        captured_layers=captured_layers,
        draft_head_embeds=draft_head_embeds,
    )
    entry = next(one for one in _MODELS.values() if one.architecture == spec.architecture)
    module = importlib.import_module(f"penstock.models.{entry.file}")
    model = cast("Decoder", getattr(module, entry.class_name)(spec, build).eval())
    use_schemes(model, schemes)
    return model


def use_schemes(model: "LoadableModel", schemes: "Schemes") -> None:
    """Each layer gets its scheme, by what the checkpoint calls it."""
    from penstock.layers.linear import Linear
    from penstock.layers.moe import Experts

    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            parts = range(len(layer.shape.outputs))
            sources = [model.weight_rules.source(Target(name, part)) for part in parts]
            layer.use(schemes.linear(sources))
        elif isinstance(layer, Experts):
            parts = range(2 * layer.num_experts)
            sources = [model.weight_rules.source(Target(f"{name}.gate_up", p)) for p in parts]
            layer.use(schemes.experts(sources), _layer_number(model, name))


def _layer_number(model: "LoadableModel", name: str) -> int:
    """Of a module; a head's block comes behind the model's layers."""
    own, number, *_ = name.split(".")
    return int(number) if own == "layers" else model.num_layers
