"""Kernels compiled before the engine needs them, by processes side by side.

The first start of a model on a GPU compiles dozens of kernels, which one process does one by one.
So copies of the engine's process, each with one layer of every kind and random weights, run a part
of what a start runs (`build.rehearse`) and leave the kernels in Triton's folder, where the engine
then finds them. What goes wrong in them costs time and nothing else.

Their memory: they are gone before the engine takes any, and there are only as many as fit in what
is free, by the size of their weights.
"""

import contextlib
import hashlib
import itertools
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.ipc.process import Copies
from penstock.kernels import triton_cache
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.runtime.build import (
    Rehearsal,
    eager_decodes,
    eager_sizes,
    most_weight_bytes,
    rehearse,
)
from penstock.types.model_spec import ModelSpec

_MIN_CPUS = 6  # fewer would make the processes wait for each other
_MAX_WAIT_S = 120.0
_BYTES_BESIDE = 4 << 30  # weights: a CUDA context, the largest step, what weights are made of
_log = log.get(__name__)


class BuilderTask(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[Rehearsal, ...]
    config: RunConfig
    model_kwargs: dict[str, Any] | None
    log_level: str | None


def stand_by(config: EngineConfig) -> Copies | None:
    """Builders that wait; before this process has threads or a CUDA context. None: of no use."""
    if config.device == "cpu" or torch.version.cuda is None or config.tensor_parallel_size > 1:
        return None
    if _num_cpus() < _MIN_CPUS:
        return None
    try:
        return Copies(_build)
    except OSError as error:
        _log.warning("kernels are compiled one by one: %s", error)
        return None


class KernelBuilders:
    """For one start of an engine. Without `copies` there are none."""

    def __init__(self, config: RunConfig, spec: ModelSpec, copies: Copies | None) -> None:
        self._config = config
        self._short = short(spec)
        self._copies = copies
        self._mark = _mark(config, self._short) if copies and config.device == "cuda" else None

    def run(self, model_kwargs: dict[str, Any] | None, log_level: str | None) -> None:
        """Returns when they have left, or at once where a start like this one has made all."""
        if self._copies is None:
            return
        if self._mark is None or self._mark.exists():
            self._copies.dismiss()
            return
        config = replace(self._config, load_format="dummy")
        parts = _parts(config)
        each = int(1.5 * most_weight_bytes(config, self._short)) + _BYTES_BESIDE
        count = min(len(parts), _num_cpus() // 2, probe().free_bytes // each)
        tasks = [
            BuilderTask(
                parts=tuple(parts[number::count]),
                config=config,
                model_kwargs=model_kwargs,
                log_level=log_level,
            )
            for number in range(count)
        ]
        self._copies.run([msgspec.to_builtins(task) for task in tasks], _MAX_WAIT_S)

    def done(self) -> None:
        """The engine has started: it has all kernels by now."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch()


def short(spec: ModelSpec) -> ModelSpec:
    """The model with one layer of each kind."""
    moe, delta = spec.moe, spec.delta

    def kind(layer: int) -> tuple[Any, ...]:
        is_moe, is_delta = moe and moe.layers[layer], delta and delta.layers[layer]
        return is_moe, is_delta, None if is_delta else spec.window_of(layer)

    first = {kind(layer): layer for layer in reversed(range(spec.num_layers))}
    layers = sorted(first.values())
    windows = spec.layer_windows
    return replace(
        spec,
        num_layers=len(layers),
        num_draft_layers=0,
        layer_windows=windows and tuple(windows[layer] for layer in layers),
        moe=moe and replace(moe, layers=tuple(moe.layers[layer] for layer in layers)),
        delta=delta and replace(delta, layers=tuple(delta.layers[layer] for layer in layers)),
    )


def _parts(config: RunConfig) -> list[Rehearsal]:
    """About as long as each other, those with most kernels first. Steps of as many tokens have
    mostly the same, in graphs or not."""
    prompts = [
        Rehearsal(
            eager_sizes=sizes,
            token_sizes=tuple(n for n in config.graph_token_sizes if sizes[0] <= n <= sizes[-1]),
        )
        for sizes in _slices(eager_sizes(config), 3)
    ]
    batch_sizes = config.graph_batch_sizes + eager_decodes(config)
    decodes = [Rehearsal(batch_sizes=sizes) for sizes in _slices(batch_sizes, 3)]
    return [Rehearsal(has_steps=True), *prompts, *decodes, Rehearsal(has_sampling=True)]


def _slices(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Neighbours together: up to the same power of two sizes have mostly the same kernels."""
    powers = itertools.groupby(sorted(sizes), lambda size: (size - 1).bit_length())
    alike = [list(own) for _, own in powers]
    each = max(1, -(-len(alike) // count))
    firsts = range(0, len(alike), each)
    return [tuple(itertools.chain(*alike[first : first + each])) for first in firsts]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _mark(config: RunConfig, shortened: ModelSpec) -> Path | None:
    """A file that says: a model like this one has started here, with settings like these."""
    triton_cache.use_cache_folder()
    if (folder := triton_cache.folder()) is None:
        return None
    same = replace(config, model="", model_path="", load_format="", seed=0, choices=())
    described = msgspec.json.encode((same, replace(shortened, eos_token_ids=())))
    return folder / f"started-{hashlib.sha256(described).hexdigest()[:32]}"


def _build(given: dict[str, Any]) -> None:
    """In a copy."""
    task = msgspec.convert(given, BuilderTask)
    log.setup("builder", task.log_level)
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        spec = parse_model_spec(Path(task.config.model_path), task.model_kwargs)
        rehearse(task.parts, task.config, short(spec))
    except Exception as error:
        _log.warning("kernels were not all made beforehand: %s: %s", type(error).__name__, error)
