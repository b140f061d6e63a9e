"""Compile workers: kernels compiled before the engine needs them, by processes side by side.

The first start of a model on a GPU compiles dozens of kernels, which one process does one by one.
So forked copies of the engine process, each with one layer of every kind and random weights, run a
part of the warmup (`_warm_up`) and leave the kernels in Triton's cache folder, where the engine
then finds them. What goes wrong in them costs time and nothing else.

Their memory: they are gone before the engine takes any, and there are only as many as fit in what
is free, by the size of their weights.
"""

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.ipc.process import ForkedWorkers
from penstock.kernels import triton_cache
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.adapters import make_batch_fields
from penstock.runtime.cache_groups import group_layers
from penstock.runtime.mixed_graphs import all_shapes
from penstock.runtime.model_loader import load_model, most_weight_bytes
from penstock.runtime.profile_steps import eager_decodes, eager_sizes
from penstock.runtime.rank import trial_cache, wire_runner
from penstock.runtime.step_layout import StepShape
from penstock.runtime.timeline import Timeline
from penstock.runtime.warmup import (
    run_decodes,
    run_padded,
    run_sizes,
    run_steps,
    warm_up_sampling,
)
from penstock.types.model_spec import ModelSpec

_MIN_CPUS = 6  # fewer would make the processes wait for each other
_MAX_WAIT_S = 120.0
_BYTES_BESIDE = 4 << 30  # the weights: a CUDA context, the largest step, sources of weights
_log = log.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupPart:
    """A part of what a start runs so that kernels are compiled."""

    has_steps: bool = False  # those where memory is planned
    has_sampling: bool = False
    eager_sizes: tuple[int, ...] = ()  # tokens of prefill steps
    batch_sizes: tuple[int, ...] = ()  # of decode steps, in graphs or not
    shapes: tuple[StepShape, ...] = ()  # of graphs of any mix


class CompileTask(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[WarmupPart, ...]
    config: RunConfig
    model_kwargs: dict[str, Any] | None
    log_level: str | None


def stand_by(config: EngineConfig) -> ForkedWorkers | None:
    """Workers that wait; forked before this process has threads or a CUDA context. None: no use."""
    if config.device == "cpu" or torch.version.cuda is None or config.num_ranks > 1:
        return None
    if _num_cpus() < _MIN_CPUS:
        return None
    try:
        return ForkedWorkers(_compile)
    except OSError as error:
        _log.warning("kernels are compiled one by one: %s", error)
        return None


class CompileWorkers:
    """For one start of an engine. Without `copies` there are none."""

    def __init__(self, config: RunConfig, spec: ModelSpec, copies: ForkedWorkers | None) -> None:
        self._config = config
        self._short = spec.shortened()
        self._copies = copies
        self._mark = _mark(config, self._short) if copies and config.device == "cuda" else None

    def run(self, model_kwargs: dict[str, Any] | None, log_level: str | None) -> None:
        """Returns when they have left, or at once if a start like this one has compiled all."""
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
            CompileTask(
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


def _warm_up(parts: Sequence[WarmupPart], config: RunConfig, spec: ModelSpec) -> None:
    """Run these parts once, eagerly and on random weights."""
    mesh = RankMesh.single()
    model, device, _ = load_model(config, spec, mesh, Timeline())
    groups = group_layers(model.cache_layers(), config)
    cache, fields = trial_cache(config, groups), make_batch_fields(config, model, device)
    runner, rows = wire_runner(config, spec, model, groups, mesh, device, cache, fields)
    for part in parts:
        if part.has_steps:
            run_steps(runner, config)
        run_sizes(runner, model, config, part.eager_sizes)
        if part.has_sampling:
            warm_up_sampling(model, mesh, device, config, spec)
        run_decodes(runner, model, rows, config.max_seq_len, part.batch_sizes)
        run_padded(runner, model, rows, config.max_seq_len, part.shapes)


def _parts(config: RunConfig) -> list[WarmupPart]:
    """Of about equal length, those with most kernels first. Steps of as many tokens take mostly the
    same kernels, in graphs or not."""
    prompts = [WarmupPart(eager_sizes=sizes) for sizes in _slices(eager_sizes(config), 3)]
    shapes = all_shapes(config)
    mixes = [WarmupPart(shapes=tuple(shapes[i::2])) for i in range(2)] if shapes else []
    batch_sizes = config.graph_batch_sizes + eager_decodes(config)
    decodes = [WarmupPart(batch_sizes=sizes) for sizes in _slices(batch_sizes, 3)]
    return [WarmupPart(has_steps=True), *prompts, *mixes, *decodes, WarmupPart(has_sampling=True)]


def _slices(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Neighbors together: sizes up to the same power of two take mostly the same kernels."""
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


def _compile(given: dict[str, Any]) -> None:
    """In a worker."""
    task = msgspec.convert(given, CompileTask)
    log.setup("compile worker", task.log_level)
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        spec = parse_model_spec(Path(task.config.model_path), task.model_kwargs)
        _warm_up(task.parts, task.config, spec.shortened())
    except Exception as error:
        _log.warning(
            "kernels were not all compiled beforehand: %s: %s", type(error).__name__, error
        )
