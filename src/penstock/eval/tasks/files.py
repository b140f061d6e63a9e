"""Reads what tasks lie in: JSON lines and CSV, packed with gzip or not."""

import csv
import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_MAX_BYTES = 256 * 2**20


def read_text(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read the examples: {error}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_BYTES:,} bytes; cut it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def read_rows(path: Path, *needed: str) -> list[Mapping[str, Any]]:
    """Each with all of `needed`; by its name a .csv file is CSV, anything else JSON lines."""
    text = read_text(path)
    rows: list[Mapping[str, Any]] = []
    try:
        if ".csv" in path.suffixes:
            rows += csv.DictReader(io.StringIO(text))
        else:
            rows += [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON lines: {error}") from None
    for number, row in enumerate(rows, 1):
        if missing := [name for name in needed if name not in row]:
            raise ConfigError(f"{path}, example {number} has no '{missing[0]}'")
    if not rows:
        raise ConfigError(f"{path} has no examples")
    return rows


def first_rows(path: Path | None, num: int, *needed: str) -> list[Mapping[str, Any]]:
    """The examples shown before the question."""
    if num == 0:
        return []
    if path is None:
        raise ConfigError(f"{num} examples to show are missing: name a file with --shots FILE")
    rows = read_rows(path, *needed)
    if len(rows) < num:
        raise ConfigError(f"{path} has {len(rows)} examples, {num} are to be shown")
    return rows[:num]
