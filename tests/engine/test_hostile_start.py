"""A start that cannot succeed says why: which file, which limit, what to do. Never a traceback."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_engine import LocalEngine
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder

INDEX = "model.safetensors.index.json"


def start(*arguments: str | Path, max_files: int | None = None, **environment: str) -> str:
    """What `penstock serve` prints before it gives up."""

    def limit() -> None:
        if max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    command = [sys.executable, "-m", "penstock", "serve", *map(str, arguments), "--port", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=240, check=False, preexec_fn=limit
    )
    assert done.returncode in (1, 2), (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(local_folder("tiny"), copy)
    return copy


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _deep(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)


def _index(value: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        names = load_file(folder / "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, value)}))

    return write


def _empty_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:0]
    save_file(weights, folder / "model.safetensors")


def _huge(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=2**31 - 1, hidden_size=2**30, head_dim=64)


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "deep config": (_deep, "config.json' is nested too deeply"),
    "eos as text": (
        lambda f: edit(f / "generation_config.json", eos_token_id="</s>"),
        "generation_config.json of .* eos_token_id: is '</s>'",
    ),
    "index values 5": (_index(5), "index.json' is not a weight index"),
    "index values null": (_index(None), "index.json' is not a weight index"),
    "index of a folder": (_index(".."), "is a folder"),
    "weights as a pipe": (lambda f: pipe(f / "model.safetensors"), "safetensors' is a pipe"),
    "an indexed pipe": (
        lambda f: (_index("model.safetensors")(f), pipe(f / "model.safetensors")),
        "safetensors' is a pipe",
    ),
    "index as a pipe": (lambda f: pipe(f / INDEX), "index.json' is a pipe"),
    "config as a pipe": (lambda f: pipe(f / "config.json"), "config.json' is a pipe"),
    "tokenizer as a pipe": (lambda f: pipe(f / "tokenizer.json"), "tokenizer.json' is a pipe"),
    "its settings as a pipe": (
        lambda f: pipe(f / "tokenizer_config.json"),
        "tokenizer_config.json' is a pipe",
    ),
    "a template as a pipe": (
        lambda f: pipe(f / "chat_template.jinja"),
        "chat_template.jinja' is a pipe",
    ),
    "weights cut short": (
        lambda f: os.truncate(f / "model.safetensors", 1000),
        "cannot read .*download it again",
    ),
    "an empty tensor": (_empty_tensor, "tensor 'model.norm.weight' has shape"),
    "more than any memory": (_huge, "no memory for the weights"),
}


# What the engine alone reads. How a server tells what it says is seen with weights cut short.
OF_THE_ENGINE = (
    *("eos as text", "index values 5", "index values null", "index of a folder", "index as a pipe"),
    *("weights as a pipe", "an indexed pipe", "an empty tensor", "more than any memory"),
)


@pytest.mark.parametrize("kind", [kind for kind in SPOILED if kind not in OF_THE_ENGINE])
def test_a_spoiled_checkpoint_is_named(folder: Path, kind: str) -> None:
    spoil, wanted = SPOILED[kind]
    spoil(folder)
    said = start(folder)
    assert re.search(wanted, said), said


@pytest.mark.parametrize("kind", OF_THE_ENGINE)
def test_an_engine_names_what_is_spoiled(folder: Path, kind: str) -> None:
    spoil, wanted = SPOILED[kind]
    spoil(folder)
    with pytest.raises(ConfigError, match=wanted):
        LocalEngine(folder)


def test_too_few_open_files_are_named() -> None:
    assert "may open 20 files at once" in start("tiny", max_files=20)


def test_a_recursive_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("kv_cache_config: &a {dtype: *a}")
    assert f"{path}, line 1: an alias" in start("tiny", "--config", path)
