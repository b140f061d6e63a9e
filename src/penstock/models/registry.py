"""HF architecture name -> the class that runs it. Model files (and torch) are imported late."""

import importlib
from typing import TYPE_CHECKING, cast

from penstock.errors import ConfigError
from penstock.types.model_spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from penstock.kernels.attention.backend import AttentionBackend
    from penstock.layers.decoder import Decoder
    from penstock.parallel.mesh import RankMesh

_MODELS = {
    "LlamaForCausalLM": "penstock.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "penstock.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "penstock.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "penstock.models.qwen3:Qwen3ForCausalLM",
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODELS)


def check_supported(spec: ModelSpec) -> None:
    """Raise before any weights are fetched for a checkpoint that could not be run."""
    if spec.quantization:
        method = spec.quantization.get("quant_algo") or spec.quantization.get("quant_method")
        raise ConfigError(
            f"the checkpoint is quantised ({method}), which is not supported; "
            "use the unquantised checkpoint of the same model"
        )


def build_model(
    spec: ModelSpec,
    mesh: "RankMesh",
    dtype: "torch.dtype",
    device: "torch.device",
    attention: "AttentionBackend",
) -> "Decoder":
    """This rank's share of the model, its parameters on `device` and not yet filled."""
    from penstock.layers.build import Build
    from penstock.quant.none import Unquantized

    build = Build(mesh=mesh, dtype=dtype, device=device, scheme=Unquantized(), attention=attention)
    module, _, name = _MODELS[spec.architecture].partition(":")
    model_class = getattr(importlib.import_module(module), name)
    return cast("Decoder", model_class(spec, build).eval())
