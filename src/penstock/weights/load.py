"""Fills a model's parameters: from a checkpoint, or with random numbers. Each value is copied once.

Which part of a tensor goes where is written on the parameters (`parallel/parameter.py`); how
tensors are called is written in the model's rules (`mapping.py`).
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import nn

from penstock.errors import ConfigError
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import PlacedParameter
from penstock.parallel.shard import Piece
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import Rules, Target
from penstock.weights.stored import StoredTensor
from penstock.weights.stream import stream, weight_files

_MAX_LISTED = 20
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class LoadableModel(Protocol):
    weight_rules: Rules

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...


@torch.inference_mode()
def load_weights(
    model: LoadableModel, folder: Path, spec: ModelSpec, mesh: RankMesh, progress: bool
) -> None:
    """Copy this rank's share of the checkpoint in `folder` into `model`.

    What does not fit the model (missing, unexpected, wrong shape) is an error that names it.
    """
    parameters = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    waiting = {
        Target(name, part)
        for name, parameter in parameters.items()
        for part in range(len(_pieces(parameter)))
    }
    unexpected: list[str] = []
    files = weight_files(folder)
    for tensor in _watched(stream(files), files, progress and mesh.rank == 0):
        target = model.weight_rules.target(tensor.name)
        if target is None or target.parameter in shared:  # tied: its other name fills it
            continue
        if target not in waiting:
            unexpected.append(tensor.name)
            continue
        _copy(tensor, parameters[target.parameter], target.part)
        waiting.remove(target)
    missing = sorted(model.weight_rules.source(target) for target in waiting)
    if missing or unexpected:
        raise ConfigError(
            f"the weights in '{folder}' are not those of {spec.architecture} as config.json "
            f"describes it; missing: {_listed(missing)}; unexpected: {_listed(unexpected)}"
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
        if name.endswith("bias"):
            mean, spread = 0.0, _BIAS_SPREAD
        elif parameter.ndim == 1:
            mean, spread = 1.0, _NORM_SPREAD
        else:
            mean, spread = 0.0, 1 / math.sqrt(parameter.shape[-1])
        parameter.normal_(mean, spread, generator=generators[device])


def _copy(tensor: StoredTensor, parameter: nn.Parameter, part: int) -> None:
    piece = _pieces(parameter)[part]
    if tensor.shape != piece.full_shape:
        raise ConfigError(
            f"tensor '{tensor.name}' has shape {list(tensor.shape)}, "
            f"config.json asks for {list(piece.full_shape)}"
        )
    if not tensor.is_float:
        raise ConfigError(
            f"tensor '{tensor.name}' is stored as {tensor.dtype}, but config.json does not say how "
            "the checkpoint is quantised"
        )
    if not piece.is_empty:
        parameter[piece.target].copy_(tensor.read(piece.source))


def _pieces(parameter: nn.Parameter) -> tuple[Piece, ...]:
    assert isinstance(parameter, PlacedParameter)
    return parameter.pieces


def _watched(
    tensors: Iterable[StoredTensor], files: tuple[Path, ...], visible: bool
) -> Iterator[StoredTensor]:
    """The same tensors, with a progress bar by bytes."""
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total = sum(file.stat().st_size for file in files)
    console = Console(stderr=True)
    visible = visible and console.is_terminal
    with Progress(*columns, console=console, disable=not visible, transient=True) as bar:
        task = bar.add_task("", total=total)
        for tensor in tensors:
            yield tensor
            bar.advance(task, tensor.num_bytes)


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
