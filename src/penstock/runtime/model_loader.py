"""One rank's model on its device: built with its quantization schemes, then filled with weights."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from penstock.config.run import (
    EagleDrafting,
    ModelDrafting,
    MTPDrafting,
    RunConfig,
    StateSaving,
)
from penstock.config.speculative import FINAL_STATE
from penstock.errors import ConfigError
from penstock.kernels import native, triton_cache
from penstock.kernels.attention.backend import get_backend
from penstock.layers.context import ExpertsContext, LayerContext
from penstock.layers.decoder import Decoder
from penstock.models.eagle3 import Eagle3Head, Eagle3Spec, parse_eagle3_spec
from penstock.models.registry import build_model, use_schemes
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import PlacedParameter
from penstock.quantization.choose import choose_schemes
from penstock.runtime.timeline import Timeline
from penstock.types.model_spec import ModelSpec
from penstock.weights.load import LoadableModel, dummy_weights, load_weights


def rank_device(config: RunConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    # Ranks fill node after node.
    index = rank % torch.cuda.device_count() if config.gpu is None else config.gpu
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def load_model(
    config: RunConfig, spec: ModelSpec, mesh: RankMesh, timeline: Timeline
) -> tuple[Decoder, torch.device, int]:
    """(model, its device, bytes of its weights)"""
    torch.set_num_threads(config.num_threads)
    device = rank_device(config, mesh.rank)
    if device.type == "cpu":
        with timeline.phase("prepare native ops"):
            native.set_num_threads(config.num_threads)
            native.set_coarse(config.reduced_precision_matmul)
    else:
        triton_cache.use_cache_folder()
    with timeline.phase("build model"):
        try:
            model = _empty_model(config, spec, mesh, device)
        except RuntimeError as error:
            if not _is_about_memory(error):
                raise
            raise ConfigError(
                f"no memory for the weights of '{config.model}' on {config.device}: "
                f"{str(error).splitlines()[0]}; use a smaller model, a quantized one "
                "(or --quantization), or more GPUs (tensor_parallel_size)"
            ) from error
    with timeline.phase("load weights"), torch.inference_mode():
        if config.load_format == "dummy":
            dummy_weights(model, config.seed)
        else:
            path = Path(config.model_path)
            load_weights(model, path, spec, mesh, progress=mesh.rank == 0)
        add_draft_model(model, config, mesh, device)
        weights = sum(cast(PlacedParameter, p).num_bytes for p in model.parameters())
        model.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return model, device, weights


def add_draft_model(
    model: Decoder, config: RunConfig, mesh: RankMesh, device: torch.device
) -> None:
    """What drafts for the model, where it has a checkpoint of its own, with its weights. Stages
    before the last one have nothing of it."""
    if not mesh.is_last_stage:
        return
    mesh = mesh.own_stage
    match config.drafting:
        case ModelDrafting(model_path=path, quantization=quantization):
            draft_spec = parse_model_spec(Path(path))
            own = replace(
                config,
                model_path=path,
                quantization=quantization,
                drafting=None,
                moe_all_to_all=False,
                expert_slots=None,
                expert_load_path=None,
            )
            draft: LoadableModel = _empty_model(own, draft_spec, mesh, device)
        case EagleDrafting(model_path=path, quantization=quantization):
            eagle_spec = parse_eagle3_spec(Path(path))
            draft_spec = eagle_spec.model
            draft = head = _empty_eagle3(config, eagle_spec, quantization, mesh, device)
            if config.load_format != "dummy":
                head.read_targets(Path(path))
        case _:
            return
    if config.load_format == "dummy":
        dummy_weights(draft, config.seed)
    else:
        load_weights(draft, Path(path), draft_spec, mesh, progress=mesh.rank == 0)
    assert isinstance(draft, nn.Module)
    model.draft_head = draft


def _empty_eagle3(
    config: RunConfig,
    spec: Eagle3Spec,
    quantization: str | None,
    mesh: RankMesh,
    device: torch.device,
) -> Eagle3Head:
    dtype = getattr(torch, config.dtype)
    schemes = choose_schemes(spec.model.quantization, None, dtype, device, online=quantization)
    build = LayerContext(
        mesh=mesh,
        dtype=dtype,
        device=device,
        cache_dtype=getattr(torch, config.kv_dtype),
        tables=schemes.tables,
        attention=get_backend(config.attention_backend),
        experts=ExpertsContext(),
        num_positions=max_row_tokens(config),
    )
    head = Eagle3Head(spec, build).eval()
    use_schemes(head, schemes)
    return head


def _is_about_memory(error: RuntimeError) -> bool:
    """On a CPU torch has no exception type for it."""
    words = ("can't allocate memory", "not enough memory", "overflow", "Storage size")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _empty_model(
    config: RunConfig, spec: ModelSpec, mesh: RankMesh, device: torch.device
) -> Decoder:
    dtype, by_reference = getattr(torch, config.dtype), config.moe_backend == "reference"
    path = None if config.load_format == "dummy" else Path(config.model_path)
    schemes = choose_schemes(
        spec.quantization,
        path,
        dtype,
        device,
        by_reference,
        config.quantization,
        config.quantized_activations,
    )
    experts = ExpertsContext(
        by_reference=by_reference,
        max_tokens=config.moe_max_tokens,
        all_to_all=config.moe_all_to_all,
        slots=config.expert_slots,
        counts_by_expert=config.expert_load_path is not None,
    )
    backend, cache_dtype = get_backend(config.attention_backend), getattr(torch, config.kv_dtype)
    captured_layers: tuple[int, ...] = ()
    match config.drafting:
        case EagleDrafting(layers=layers):
            captured_layers = layers
        case StateSaving(layers=layers):
            captured_layers = (*layers, FINAL_STATE)
    return build_model(
        spec,
        mesh,
        dtype,
        device,
        backend,
        schemes,
        cache_dtype,
        experts,
        max_row_tokens(config),
        has_mtp=isinstance(config.drafting, MTPDrafting),
        captured_layers=captured_layers,
        draft_head_embeds=isinstance(config.drafting, MTPDrafting | EagleDrafting),
    )


def max_row_tokens(config: RunConfig) -> int:
    """Tokens of one row: a step in flight may write one beyond a sequence's end."""
    return config.max_seq_len + config.depth


def most_weight_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """About the bytes of the weights on such a device, and no less. Needs no device."""
    model = _empty_model(config, spec, RankMesh.single(), torch.device("meta"))
    placed = [cast(PlacedParameter, parameter) for parameter in model.parameters()]
    # Parameters that online quantization creates while reading have no size yet; they have at most
    # 8 bits a value.
    return sum(max(p.num_bytes, sum(piece.num_values for piece in p.pieces)) for p in placed)
