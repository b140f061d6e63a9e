"""`penstock models`: what lies in the caches, and deleting it."""

import argparse
import dataclasses
import difflib
import json
import sys

from penstock.config.schema import DEFAULT_MODEL
from penstock.errors import ConfigError
from penstock.hub.cached import CachedModel, cached_models, delete
from penstock.models.registry import supported_architectures


def run(args: argparse.Namespace) -> int:
    models = cached_models(supported_architectures())
    if args.delete is not None:
        return _delete(_named(args.delete, models), args.yes)
    if args.json:
        rows = [dataclasses.asdict(model) | {"path": str(model.path)} for model in models]
        print(json.dumps(rows, indent=2))
    elif models:
        _show(models)
    else:
        print(f"No model has been fetched yet; 'penstock pull {DEFAULT_MODEL}' fetches one.")
    return 0


def _show(models: list[CachedModel]) -> None:
    rows = [("NAME", "KIND", "SIZE", "PATH")]
    rows += [(model.name, model.kind, _size(model.size_bytes), str(model.path)) for model in models]
    name, kind, size = (max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        print(f"{row[0]:<{name}}  {row[1]:<{kind}}  {row[2]:>{size}}  {row[3]}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _named(name: str, models: list[CachedModel]) -> CachedModel:
    for model in models:
        if model.name == name:
            return model
    near = difflib.get_close_matches(name, [model.name for model in models], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "; 'penstock models' lists what there is"
    raise ConfigError(f"no model '{name}' in the caches{hint}")


def _delete(model: CachedModel, is_sure: bool) -> int:
    question = f"delete '{model.name}' ({_size(model.size_bytes)}, {model.path})?"
    if not is_sure:
        if not sys.stdin.isatty():
            raise ConfigError(f"{question} There is nobody to ask; add --yes")
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            print("kept")
            return 1
    delete(model)
    print(f"deleted '{model.name}', {_size(model.size_bytes)}")
    return 0
