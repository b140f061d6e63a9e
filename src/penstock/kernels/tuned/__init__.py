"""Launch configs of kernels that were measured: one JSON file per GPU, by op and by shape.

Written by `penstock tune`, never at start. The files of this package hold what was measured for a
release; one in the cache folder (`own_file`) comes before them. What is in neither has the kernel's
own default.
"""

import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.hub.folder import cache_home
from penstock.kernels.device import probe

Config = TypeVar("Config")
Entries = dict[str, dict[str, dict[str, int]]]
"""op -> shape -> fields of the op's launch config"""
_OLD_NAMES = {"tiles": "small_m", "coded": "weight_only", "experts few": "experts small_m"}
"""Ops as files of earlier versions call them."""


def best(op: str, default: Config, **shape: int) -> Config:
    """The configuration of `op` for `shape` on this GPU; a dataclass like `default`."""
    gpu = probe().name
    fields = entries(gpu).get(op, {}).get(key(**shape))
    if fields is None:
        return default
    try:
        return type(default)(**fields)
    except TypeError as error:
        raise _unusable(gpu, f"{op}, {key(**shape)}: {error}") from error


def key(**shape: int) -> str:
    return " ".join(f"{name}={value}" for name, value in shape.items())


@functools.cache
def entries(gpu: str) -> Entries:
    found: Entries = {}
    try:
        for text in (_shipped(gpu), _own(gpu)):
            if text is not None:
                for name, shapes in json.loads(text)["ops"].items():
                    op = _OLD_NAMES.get(name, name)
                    found[op] = found.get(op, {}) | shapes
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unusable(gpu, f"{type(error).__name__}: {error}") from error
    return found


def _unusable(gpu: str, why: str) -> ConfigError:
    return ConfigError(f"{own_file(gpu)}: {why}; delete the file or run 'penstock tune' again")


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json"""
    return f"{slug(gpu)}.json"


def own_file(gpu: str) -> Path:
    """What was tuned on this machine."""
    return cache_home() / "tuned" / file_name(gpu)


def slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def ceilings(gpu: str) -> dict[str, float]:
    """Measured limits of this GPU by name, such as read_tbps; empty: nobody has measured them."""
    text = _shipped(gpu)
    found: dict[str, Any] = {} if text is None else json.loads(text)
    return dict(found.get("ceilings", {}))


def _shipped(gpu: str) -> str | None:
    file = resources.files(__name__) / file_name(gpu)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _own(gpu: str) -> str | None:
    file = own_file(gpu)
    return file.read_text(encoding="utf-8") if file.is_file() else None
