"""Builders of kernels: which layers they take, who does what, and when there is nothing to do."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.resolve import resolve
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.runtime import build, builders
from penstock.types.model_spec import ModelSpec

SIBLINGS = Path(__file__).parents[2] / "siblings"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [("deepseek_v3", 2), ("gpt_oss", 2), ("qwen2_moe", 1), ("qwen3_next", 2), ("tiny", 1)],
)
def test_one_layer_of_each_kind(name: str, num_layers: int) -> None:
    spec = parse_model_spec(local_folder("tiny") if name == "tiny" else SIBLINGS / name)
    short = builders.short(spec)

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
    return dataclasses.replace(config, device="cuda", **(sizes | changes)), spec


class FakeCopies:
    def __init__(self, act: Callable[[dict[str, Any]], None] = lambda task: None) -> None:
        self.tasks: list[builders.BuilderTask] | None = None
        self.is_dismissed = False

    def run(self, tasks: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        wire = msgspec.json.decode(msgspec.json.encode(tasks))
        self.tasks = msgspec.convert(wire, list[builders.BuilderTask])

    def dismiss(self) -> None:
        self.is_dismissed = True


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeCopies]:
    def start(config: RunConfig, spec: ModelSpec, cpus: int = 16, free: int = 80) -> FakeCopies:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(builders, "_num_cpus", lambda: cpus)
        gpu = dataclasses.replace(probe(), free_bytes=free * GIB)
        monkeypatch.setattr(builders, "probe", lambda: gpu)
        copies = FakeCopies()
        one = builders.KernelBuilders(config, spec, copies)
        one.run(None, "info")
        one.done()
        return copies

    return start


def test_a_second_start_builds_nothing(start: Callable[..., FakeCopies]) -> None:
    first, second = start(*on_gpu()), start(*on_gpu())
    assert first.tasks and not first.is_dismissed
    assert second.tasks is None and second.is_dismissed
    assert start(*on_gpu(max_batch_size=3)).tasks


@pytest.mark.parametrize(("cpus", "free", "count"), [(16, 80, 8), (6, 80, 3), (16, 9, 2)])
def test_all_parts_are_dealt_out(
    start: Callable[..., FakeCopies], cpus: int, free: int, count: int
) -> None:
    """To as many as there are processors and memory for; each runs on random weights."""
    config, spec = on_gpu()
    tasks = start(config, spec, cpus, free).tasks
    assert tasks is not None and len(tasks) == count
    parts = [part for task in tasks for part in task.parts]
    assert [part.has_steps for part in parts].count(True) == 1
    assert [part.has_sampling for part in parts].count(True) == 1
    batch_sizes = sorted(size for part in parts for size in part.batch_sizes)
    assert batch_sizes == [1, 2, 4, 8, 16, 24, 32]
    assert sorted(size for part in parts for size in part.token_sizes) == [16, 32, 64]
    eager = sorted(size for part in parts for size in part.eager_sizes)
    assert eager == list(build.eager_sizes(config))
    assert {task.config.load_format for task in tasks} == {"dummy"}


def test_sizes_up_to_one_power_of_two_stay_together() -> None:
    sizes = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    slices = builders._slices(sizes, 3)
    assert slices == [(1, 2, 4), (8, 16, 24, 32), (40, 48, 56, 64)]


def test_without_graphs_there_are_decodes_of_all_sizes(start: Callable[..., FakeCopies]) -> None:
    tasks = start(*on_gpu(graph_batch_sizes=(), graph_token_sizes=())).tasks
    assert tasks is not None
    parts = [part for task in tasks for part in task.parts]
    assert build.Rehearsal() not in parts and not any(part.token_sizes for part in parts)
    batch_sizes = sorted(size for part in parts for size in part.batch_sizes)
    assert batch_sizes == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 28, 32]


def test_where_not_even_one_fits_nobody_builds(start: Callable[..., FakeCopies]) -> None:
    assert start(*on_gpu(), free=3).tasks == []


@pytest.mark.parametrize("name", ["tiny", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_builder_runs_its_parts(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where there are no kernels to make: every step there is, once."""
    folder = local_folder("tiny") if name == "tiny" else SIBLINGS / name
    spec = parse_model_spec(folder)
    asked = EngineConfig(
        model=str(folder), device="cpu", load_format="dummy", max_batch_size=8,
        max_num_tokens=64, max_seq_len=64,
    )  # fmt: skip
    sizes = {"graph_batch_sizes": (1, 2, 8), "graph_token_sizes": (16, 32)}
    sizes |= {"attention_backend": "reference"}  # the usual one of a CPU is given no padding
    config = dataclasses.replace(resolve(asked, spec, probe(), str(folder)), **sizes)
    ran: list[Any] = []

    def noting(name: str, describe: Callable[..., Any]) -> None:
        real = getattr(build, name)

        def noted(*args: Any) -> Any:
            ran.append(describe(*args))
            return real(*args)

        monkeypatch.setattr(build, name, noted)

    noting("run_steps", lambda runner, config: "steps")
    noting("rehearse_sampling", lambda *args: "sampling")
    noting("_prompts", lambda size, num_rows, config: size)
    noting("decode_inputs", lambda rows, size: size)
    noting("chunk_inputs", lambda rows, size: size)
    monkeypatch.setattr(builders.log, "setup", lambda *args: None)
    task = builders.BuilderTask(
        parts=tuple(builders._parts(config)), config=config, model_kwargs=None, log_level=None
    )
    with caplog.at_level("INFO"):
        builders._build(msgspec.to_builtins(task))
    assert not caplog.records, caplog.text
    eager = build.eager_sizes(config)
    assert eager[0] == 1 and eager[-1] == 64
    assert [one for one in ran if isinstance(one, str)] == ["steps", "sampling"]
    chunks = () if name == "deepseek_v3" else (16, 32)
    sizes = [one for one in ran if not isinstance(one, str)]
    assert sorted(sizes) == sorted([64, *eager, 1, 2, 8, *chunks])


def test_a_builder_that_fails_warns_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(builders, "rehearse", fail)
    monkeypatch.setattr(builders.log, "setup", lambda *args: None)
    config, _ = on_gpu()
    task = builders.BuilderTask(parts=(), config=config, model_kwargs=None, log_level=None)
    with caplog.at_level("INFO"):
        builders._build(msgspec.to_builtins(task))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ValueError: out of luck" in caplog.text


def test_a_mark_tells_settings_apart_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config, spec = on_gpu()
    mark = builders._mark(config, spec)
    for other in ({"model_path": "elsewhere"}, {"seed": 7}, {"load_format": "dummy"}):
        assert mark == builders._mark(dataclasses.replace(config, **other), spec)
    assert mark != builders._mark(dataclasses.replace(config, max_batch_size=3), spec)
    assert mark != builders._mark(config, dataclasses.replace(spec, vocab_size=9))


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
def test_builders_stand_by_where_they_may_be_of_use(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    cuda: str | None,
    cpus: int,
    is_made: bool,
) -> None:
    monkeypatch.setattr(builders, "Copies", FakeCopies)
    monkeypatch.setattr(builders.torch.version, "cuda", cuda)
    monkeypatch.setattr(builders, "_num_cpus", lambda: cpus)
    assert (builders.stand_by(EngineConfig(model="tiny", **settings)) is not None) == is_made


def test_where_no_process_can_be_made_the_engine_starts_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(act: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(builders, "Copies", fail)
    monkeypatch.setattr(builders.torch.version, "cuda", "13.0")
    monkeypatch.setattr(builders, "_num_cpus", lambda: 16)
    assert builders.stand_by(EngineConfig(model="tiny")) is None


def test_a_folder_that_cannot_be_written_stops_no_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "missing"))
    builders.KernelBuilders(*on_gpu(), FakeCopies()).done()
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
