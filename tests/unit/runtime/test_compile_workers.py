"""Compile workers: which layers they take, who does what, and when there is nothing to do.

With stand-ins for the processes and for the GPU's memory: what is shown is who is asked to do what,
and on a CPU that a worker runs all of it. That kernels are then there: on a GPU, by the start times
of `benchmarks/table.py`.
"""

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.config.resolve import resolve
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.layers.decoder import Decoder
from penstock.models.spec import parse_model_spec
from penstock.runtime import compile_workers, model_loader, profile_steps
from penstock.runtime.step_layout import StepShape
from penstock.sampling.sampler import Sampler
from penstock.types.model_spec import ModelSpec
from penstock.types.step import RowJoin

SIBLINGS = Path(__file__).parents[2] / "siblings"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [("deepseek_v3", 2), ("gpt_oss", 2), ("qwen2_moe", 1), ("qwen3_next", 2), ("tiny", 1)],
)
def test_one_layer_of_each_kind(name: str, num_layers: int) -> None:
    spec = parse_model_spec(local_folder("tiny") if name == "tiny" else SIBLINGS / name)
    short = spec.shortened()

    def kinds(spec: ModelSpec) -> set[tuple[object, ...]]:
        return {
            (
                spec.moe is not None and spec.moe.layers[layer],
                spec.delta is not None and spec.delta.layers[layer],
                spec.window_of(layer),
            )
            for layer in range(spec.num_layers)
        }

    assert kinds(short) == kinds(spec) and short.num_layers == num_layers
    assert len(short.layer_windows) in (0, short.num_layers)


def on_gpu(**changes: Any) -> tuple[RunConfig, ModelSpec]:
    folder = local_folder("tiny")
    spec = parse_model_spec(folder)
    config = resolve(EngineConfig(model=str(folder), device="cpu"), spec, probe(), str(folder))
    sizes = {"graph_batch_sizes": (1, 2, 4, 8, 16, 24, 32), "graph_token_sizes": (16, 32, 64)}
    sizes |= {"graph_padding": True, "max_batch_size": 32}
    sizes |= {"graph_mixes": ((32, 64), (8, 32)), "graph_mixes_when_idle": ((16, 64),)}
    return dataclasses.replace(config, device="cuda", **(sizes | changes)), spec


class FakeWorkers:
    def __init__(self, act: Callable[[dict[str, Any]], None] = lambda task: None) -> None:
        self.tasks: list[compile_workers.CompileTask] | None = None
        self.is_dismissed = False

    def run(self, tasks: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        wire = msgspec.json.decode(msgspec.json.encode(tasks))
        self.tasks = msgspec.convert(wire, list[compile_workers.CompileTask])

    def dismiss(self) -> None:
        self.is_dismissed = True


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeWorkers]:
    def start(config: RunConfig, spec: ModelSpec, cpus: int = 16, free: int = 80) -> FakeWorkers:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
        gpu = dataclasses.replace(probe(), free_bytes=free * GIB)
        monkeypatch.setattr(compile_workers, "probe", lambda: gpu)
        copies = FakeWorkers()
        one = compile_workers.CompileWorkers(config, spec, copies)
        one.run(None, "info")
        one.done()
        return copies

    return start


def test_a_second_start_compiles_nothing(start: Callable[..., FakeWorkers]) -> None:
    first, second = start(*on_gpu()), start(*on_gpu())
    assert first.tasks and not first.is_dismissed
    assert second.tasks is None and second.is_dismissed
    assert start(*on_gpu(max_batch_size=3)).tasks


def parts_of(copies: FakeWorkers) -> list[compile_workers.WarmupPart]:
    assert copies.tasks is not None
    return [part for task in copies.tasks for part in task.parts]


@pytest.mark.parametrize(("cpus", "free"), [(16, 80), (6, 80), (64, 800), (16, 9), (16, 5)])
def test_all_parts_are_dealt_out(start: Callable[..., FakeWorkers], cpus: int, free: int) -> None:
    """Each to one worker, which runs on random weights."""
    config, spec = on_gpu()
    copies = start(config, spec, cpus, free)
    parts = parts_of(copies)
    assert [part.has_steps for part in parts].count(True) == 1
    assert [part.has_sampling for part in parts].count(True) == 1
    batch_sizes = sorted(size for part in parts for size in part.batch_sizes)
    assert batch_sizes == sorted(config.graph_batch_sizes)
    shapes = [shape for part in parts for shape in part.shapes]
    prompts = [StepShape(0, size) for size in config.graph_token_sizes]
    mixes = [StepShape(*mix) for mix in config.graph_mixes + config.graph_mixes_when_idle]
    assert len(shapes) == len(set(shapes)) and set(shapes) == {*prompts, *mixes}
    eager = sorted(size for part in parts for size in part.eager_sizes)
    assert eager == list(profile_steps.eager_sizes(config))
    assert copies.tasks is not None
    assert all(task.parts and task.config.load_format == "dummy" for task in copies.tasks)


def test_there_are_as_many_workers_as_processors_and_memory_allow(
    start: Callable[..., FakeWorkers],
) -> None:
    first_time = itertools.count(100)  # of these settings

    def count(cpus: int, free: int) -> int:
        return len(start(*on_gpu(max_queued=next(first_time)), cpus, free).tasks or ())

    by_cpus = [count(cpus, 800) for cpus in (6, 8, 12, 16, 64)]
    assert by_cpus == sorted(by_cpus) and 1 < by_cpus[0] < by_cpus[-1]
    assert all(num <= cpus for num, cpus in zip(by_cpus, (6, 8, 12, 16, 64), strict=True))
    by_memory = [count(64, free) for free in (5, 9, 20, 80)]
    assert by_memory == sorted(by_memory) and by_memory[0] == 1 < by_memory[-1]
    weights = model_loader.most_weight_bytes(*on_gpu())
    assert all(n * weights < free * GIB for n, free in zip(by_memory, (5, 9, 20, 80), strict=True))


def test_sizes_up_to_one_power_of_two_stay_together(start: Callable[..., FakeWorkers]) -> None:
    """They have mostly the same kernels, which two workers would both compile."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    parts = parts_of(start(*on_gpu(graph_batch_sizes=sizes, max_batch_size=64)))
    held = [{(size - 1).bit_length() for size in part.batch_sizes} for part in parts]
    assert sum(map(len, held)) == len(set().union(*held)) == 7
    assert sum(bool(powers) for powers in held) > 1, "nobody has all of them"


def test_without_graphs_there_are_decodes_of_all_sizes(start: Callable[..., FakeWorkers]) -> None:
    without = dict.fromkeys(("graph_batch_sizes", "graph_token_sizes"), ())
    config, spec = on_gpu(graph_mixes=(), graph_mixes_when_idle=(), **without)
    parts = parts_of(start(config, spec))
    assert compile_workers.WarmupPart() not in parts and not any(part.shapes for part in parts)
    batch_sizes = sorted(size for part in parts for size in part.batch_sizes)
    assert batch_sizes == sorted(profile_steps.eager_decodes(config))
    assert batch_sizes[0] == 1 and batch_sizes[-1] == config.max_batch_size


def test_where_not_even_one_fits_nobody_compiles(start: Callable[..., FakeWorkers]) -> None:
    assert start(*on_gpu(), free=3).tasks == []


@pytest.mark.parametrize("name", ["tiny", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_worker_runs_its_parts(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where there are no kernels to compile: every step there is, once."""
    folder = local_folder("tiny") if name == "tiny" else SIBLINGS / name
    spec = parse_model_spec(folder)
    asked = EngineConfig(
        model=str(folder), device="cpu", load_format="dummy", max_batch_size=8,
        max_num_tokens=64, max_seq_len=64,
    )  # fmt: skip
    sizes = {"graph_batch_sizes": (1, 2, 8), "graph_token_sizes": (16, 32)}
    sizes |= {"attention_backend": "reference"}  # the usual one of a CPU is given no padding
    config = dataclasses.replace(resolve(asked, spec, probe(), str(folder)), **sizes)
    ran: list[tuple[int, bool]] = []  # tokens of a step, whether it is one of a decode

    def note(module: Any, args: Any) -> None:
        if isinstance(module, Decoder):
            (batch,) = args
            ran.append((batch.num_tokens, batch.num_decodes == batch.num_tokens))

    temperatures: set[float] = set()
    join = Sampler.join

    def noted_join(self: Sampler, joins: Sequence[RowJoin]) -> None:
        temperatures.update(one.sampling.temperature for one in joins)
        join(self, joins)

    monkeypatch.setattr(Sampler, "join", noted_join)
    monkeypatch.setattr(compile_workers.log, "setup", lambda *args: None)
    task = compile_workers.CompileTask(
        parts=tuple(compile_workers._parts(config)),
        config=config,
        model_kwargs=None,
        log_level=None,
    )
    hook = register_module_forward_pre_hook(note)
    try:
        with caplog.at_level("INFO"):
            compile_workers._compile(msgspec.to_builtins(task))
    finally:
        hook.remove()
    assert not caplog.records, caplog.text
    eager = profile_steps.eager_sizes(config)
    assert eager[0] == 1 and eager[-1] == 64
    assert {size for size, is_decode in ran if is_decode} >= {1, 2, 8}
    chunks = set() if name == "deepseek_v3" else {16, 32}
    assert {size for size, _ in ran} >= {*eager, *chunks}
    assert 0.0 in temperatures and max(temperatures) > 0.0, "greedy tokens and drawn ones"


def test_a_worker_that_fails_warns_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(compile_workers, "_warm_up", fail)
    monkeypatch.setattr(compile_workers.log, "setup", lambda *args: None)
    config, _ = on_gpu()
    task = compile_workers.CompileTask(parts=(), config=config, model_kwargs=None, log_level=None)
    with caplog.at_level("INFO"):
        compile_workers._compile(msgspec.to_builtins(task))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ValueError: out of luck" in caplog.text


def test_a_start_knows_another_by_what_its_kernels_depend_on(
    start: Callable[..., FakeWorkers],
) -> None:
    config, spec = on_gpu()
    assert start(config, spec).tasks
    for other in ({"model": "another"}, {"seed": 7}, {"load_format": "dummy"}):
        assert start(dataclasses.replace(config, **other), spec).tasks is None, other
    assert start(config, dataclasses.replace(spec, vocab_size=9)).tasks


@pytest.mark.parametrize(
    ("settings", "cuda", "cpus", "is_made"),
    [
        ({}, "13.0", 16, True),
        ({}, "13.0", 2, False),
        ({}, None, 16, False),
        ({"device": "cpu"}, "13.0", 16, False),
        ({"tensor_parallel_size": 2}, "13.0", 16, False),
    ],
)
def test_workers_stand_by_where_they_may_be_of_use(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    cuda: str | None,
    cpus: int,
    is_made: bool,
) -> None:
    monkeypatch.setattr(compile_workers, "ForkedWorkers", FakeWorkers)
    monkeypatch.setattr(compile_workers.torch.version, "cuda", cuda)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert (compile_workers.stand_by(EngineConfig(model="tiny", **settings)) is not None) == is_made


def test_where_no_process_can_be_made_the_engine_starts_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(act: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(compile_workers, "ForkedWorkers", fail)
    monkeypatch.setattr(compile_workers.torch.version, "cuda", "13.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert compile_workers.stand_by(EngineConfig(model="tiny")) is None


def test_a_folder_that_cannot_be_written_stops_no_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "missing"))
    compile_workers.CompileWorkers(*on_gpu(), FakeWorkers()).done()
    assert not (tmp_path / "missing").exists()


IMPORT = """
import threading, torch

def forbidden(*args, **kwargs):
    raise AssertionError("asked for a GPU")

for name in ("_lazy_init", "is_available", "device_count", "get_device_properties"):
    setattr(torch.cuda, name, forbidden)
import penstock.engine_process
assert threading.active_count() == 1, threading.enumerate()
"""


def test_an_engine_can_be_copied_once_it_is_imported() -> None:
    """A copy of a process with a CUDA context has none and can make none."""
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=120)
