"""Fills a model's parameters: from a checkpoint, or with random numbers. Each value is copied once.

Which part of a tensor goes where is written on the parameters (`parallel/parameter.py`); how
tensors are called is written in the model's rules (`mapping.py`).
"""

import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock import log
from penstock.errors import ConfigError
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import PlacedParameter, UnreadParameter
from penstock.parallel.shard import Piece
from penstock.parallel.stages import is_elsewhere
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Rules, Target
from penstock.weights.quantized import gathered
from penstock.weights.stored import StoredTensor, paired, unfused, unstacked, wanted_dtypes
from penstock.weights.stream import stream, weight_files

_log = log.get(__name__)
_MAX_LISTED = 20
_MAX_DRAWN = 1 << 28  # 16-bit values at a time that become FP8 or INT8
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class LoadableModel(Protocol):
    weight_rules: Rules
    num_layers: int

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


@torch.inference_mode()
def load_weights(
    model: LoadableModel, folder: Path, spec: ModelSpec, mesh: RankMesh, progress: bool
) -> None:
    """Copy this rank's shard of the checkpoint in `folder` into `model`.

    What does not fit the model (missing, unexpected, wrong shape) is an error that names it.
    """
    rules, parameters = model.weight_rules, dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    waiting = {
        Target(name, part)
        for name, parameter in parameters.items()
        for part in range(len(_pieces(parameter)))
    }
    unexpected: dict[str, None] = {}  # in the order of the files, each once
    not_ours = _scales_of_other_caches(model, spec)
    num_left = 0
    files = weight_files(folder)
    tensors = _watched(stream(files), files, progress and mesh.rank == 0)
    if (found := spec.quantization) is not None:
        for part in found.mixed:
            if part.spec.weight_only is not None:
                tensors = gathered(tensors, part.spec.weight_only, frozenset(part.modules))
        if found.weight_only is not None:
            tensors = gathered(tensors, found.weight_only)
    for name, tensor in named_parts(tensors, rules):
        target = rules.target(name)
        if target is None or target.parameter in shared:  # tied: its other name fills it
            continue
        if target not in waiting or target.parameter in not_ours:
            if not (rules.is_spare(name) or is_elsewhere(model, target.parameter)):
                unexpected[tensor.name] = None
            num_left += target in waiting
            continue
        _copy(tensor, parameters[target.parameter], target.part)
        waiting.remove(target)
    missing: set[str] = set()
    for target in waiting:
        if (default := _placed(parameters[target.parameter]).default) is None:
            missing.add(rules.source(target))
        else:
            place = _pieces(parameters[target.parameter])[target.part].target
            parameters[target.parameter][place].fill_(default)
    if num_left and mesh.rank == 0:
        _log.warning(
            "%d scales of the KV cache are not used: the checkpoint does not say that they are "
            "those of a cache like this run's, which has the usual ones",
            num_left,
        )
    if missing or unexpected:
        raise ConfigError(
            f"the weights in '{folder}' are not those of {spec.architecture} as config.json "
            f"describes it; missing: {_listed(sorted(missing))}; "
            f"unexpected: {_listed(list(unexpected))}"
        )


@torch.inference_mode()
def dummy_weights(model: LoadableModel, seed: int) -> None:
    """Random weights of a sensible scale, made where the parameters are.

    Norms are near one, biases small, and matrices keep the size of what passes through. The numbers
    depend on this rank's shapes: another number of ranks is another model.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if (typical := _typical(parameter)) is not None:
            mean, spread = typical
        elif parameter.dtype == torch.uint8:  # codes, as likely one as the other
            parameter.random_(generator=generators[device])
            continue
        elif name.endswith("bias"):
            mean, spread = 0.0, _BIAS_SPREAD
        elif parameter.ndim == 1:
            mean, spread = 1.0, _NORM_SPREAD
        else:
            mean, spread = 0.0, 1 / math.sqrt(parameter.shape[-1])
        _fill(parameter, mean, spread, generators[device])


def _scales_of_other_caches(model: LoadableModel, spec: ModelSpec) -> set[str]:
    """Parameters for scales of a KV cache in a format that the checkpoint is not made for."""
    made_for = spec.quantization.cache_dtype if spec.quantization is not None else None
    return {
        f"{place}.{name}"
        for place, layer in model.named_modules()
        for name, _ in layer.named_parameters(recurse=False)
        if model.weight_rules.is_spare(f"{place}.{name}") and layer.cache_dtype != made_for
    }


def _typical(parameter: nn.Parameter) -> tuple[float, float] | None:
    placed = _placed(parameter)
    return placed.typical or (None if placed.default is None else (placed.default, 0.0))


def _fill(parameter: Tensor, mean: float, spread: float, generator: torch.Generator) -> None:
    if parameter.dtype.itemsize > 1:
        parameter.normal_(mean, spread, generator=generator)
        if parameter.dtype == torch.float32 and parameter.ndim == 2:
            parameter.copy_(parameter.bfloat16())  # as checkpoints have them
        return
    # torch draws no FP8 or INT8; beyond the largest a value would wrap around, or become NaN.
    is_float = parameter.dtype.is_floating_point
    limits = torch.finfo(parameter.dtype) if is_float else torch.iinfo(parameter.dtype)
    per_row = max(1, parameter.numel() // max(1, len(parameter)))
    for part in parameter.split(max(1, _MAX_DRAWN // per_row)):
        drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        drawn.normal_(mean, spread, generator=generator).clamp_(limits.min, limits.max)
        part.copy_(drawn if is_float else drawn.round_())


def _copy(tensor: StoredTensor, parameter: nn.Parameter, part: int) -> None:
    piece = _pieces(parameter)[part]
    if _squeezed(tensor.shape) != _squeezed(piece.full_shape):
        raise ConfigError(
            f"tensor '{tensor.name}' has shape {list(tensor.shape)}, "
            f"config.json asks for {list(piece.full_shape)}"
        )
    if not tensor.fits(parameter.dtype):
        wanted = wanted_dtypes(parameter.dtype)
        expected = "config.json asks for floats"
        if len(wanted) == 1:
            expected = f"its quantization asks for {wanted[0]}"
        raise ConfigError(
            f"tensor '{tensor.name}' is stored as {tensor.dtype}, but {expected}; the checkpoint "
            "does not say how (or which of) its layers are quantized"
        )
    num_extra = len(piece.shards) - len(tensor.shape)
    if isinstance(parameter, UnreadParameter):
        parameter.sources[part] = tensor
    elif tensor.shape == piece.full_shape[max(num_extra, 0) :]:  # the rest: its place in a stack
        if not piece.is_empty:
            parameter[piece.target].copy_(tensor.read(piece.source[num_extra:]))
    else:  # a scale that is [] in one format and [1] in another
        whole = tensor.read(tuple(slice(None) for _ in tensor.shape))
        parameter[piece.target].copy_(whole.reshape(piece.full_shape)[piece.source])


def named_parts(
    tensors: Iterable[StoredTensor], rules: Rules
) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor and its name; one that the rules take apart as those that it is made of."""
    for tensor in tensors:
        if (stack := rules.unstack(tensor.name)) is not None:
            yield from unstacked(tensor, stack)
        elif (fused := rules.unfuse(tensor.name)) is not None:
            yield from unfused(tensor, fused)
        elif (pair := rules.pair(tensor.name)) is not None:
            yield tensor.name, paired(tensor, pair)
        else:
            yield tensor.name, tensor


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _placed(parameter: nn.Parameter) -> PlacedParameter:
    assert isinstance(parameter, PlacedParameter)
    return parameter


def _pieces(parameter: nn.Parameter) -> tuple[Piece, ...]:
    return _placed(parameter).pieces


def _watched(
    tensors: Iterable[StoredTensor], files: tuple[Path, ...], visible: bool
) -> Iterator[StoredTensor]:
    """The same tensors, with a progress bar by bytes where somebody sees it."""
    if not (visible and sys.stderr.isatty()):
        yield from tensors
        return
    from rich import progress
    from rich.console import Console

    total = sum(file.stat().st_size for file in files)
    columns = (
        progress.TextColumn("loading weights"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        for tensor in tensors:
            yield tensor
            bar.advance(task, tensor.num_bytes)


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
