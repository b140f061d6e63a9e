"""What a model is for: sentence-transformers' files in its folder say so, or the setting `task`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.hub.files import read_json, read_text
from penstock.types.pooling import Task

_MODULES = "modules.json"
_LAST_TOKEN = "pooling_mode_lasttoken"


@dataclass(frozen=True, slots=True)
class ServedTask:
    task: Task
    reason: str
    normalizes: bool = True  # embeddings have length 1, unless a request wants them as they are


def served_task(asked: Literal["auto", "generate", "embed", "score"], folder: Path) -> ServedTask:
    """`folder`: the model's, or its GGUF file."""
    if asked in (Task.GENERATE, Task.SCORE):
        return ServedTask(Task(asked), "set by task")
    modules = _modules(folder)
    if modules is None:
        if asked == Task.EMBED:
            return ServedTask(Task.EMBED, "set by task")
        return ServedTask(Task.GENERATE, f"the model has no {_MODULES}")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    for kind, one in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            _check_pooling(folder / Path(str(one.get("path", ""))).name)
        elif kind not in ("Transformer", "Normalize"):
            raise ConfigError(
                f"{_MODULES} of '{folder}' has a module '{kind}', which embeddings here have not; "
                "there are Transformer, Pooling of the last token, and Normalize"
            )
    return ServedTask(Task.EMBED, f"{_MODULES} of the model", "Normalize" in kinds)


def _modules(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / _MODULES
    if not folder.is_dir() or not path.exists():
        return None
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not JSON: {error}; fetch it again") from None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"'{path}' holds no list of modules; fetch it again")
    return modules


def _check_pooling(folder: Path) -> None:
    fields = read_json(folder / "config.json")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    stated = fields.get("pooling_mode")  # as newer files have it
    if modes == [_LAST_TOKEN] or (not modes and stated == "lasttoken"):
        return
    raise ConfigError(
        f"'{folder}' pools by {', '.join(modes) or stated}; embeddings here are the hidden state "
        f"of the last token ({_LAST_TOKEN})"
    )
