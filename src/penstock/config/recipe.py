"""The published recipes by name: one YAML file each in `recipes/`, as `--config` takes it.

A file's first line, a comment, says what sets it apart; its name ends with the kind of GPU, where
the recipe names one. Knows no command line: what a user gives wins, whatever it came from.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import log
from penstock.config.load import merge
from penstock.config.messages import shown
from penstock.config.trtllm_fields import canonical
from penstock.config.yaml_file import read_yaml
from penstock.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "recipes"
_GPU = re.compile(r"-(h100|h200|b200|gb200)(?:-|$)")
_logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    path: Path
    about: str
    settings: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.settings["model"])

    @property
    def gpus(self) -> str:
        """How many, and of which kind: "8 H200"."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        sizes = [self.settings.get(name, 1) for name in names]
        kind = _GPU.search(self.name)
        return f"{math.prod(sizes)} {kind[1].upper() if kind else 'of any kind'}"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_named(name: str) -> Recipe:
    known = recipe_names()
    if name not in known:
        hint = did_you_mean(name, known) or "; 'penstock recipes' lists what there is"
        raise ConfigError(f"there is no recipe '{name}'{hint}")
    path = FOLDER / f"{name}.yaml"
    with path.open(encoding="utf-8") as file:
        about = file.readline().removeprefix("#").strip()
    return Recipe(name, path, about, canonical(read_yaml(path)))


def with_recipe(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's settings with the user's over them. The log says which came from where."""
    kept: list[str] = []
    replaced: list[str] = []
    for field, value, is_kept in _origins(recipe.settings, given):
        (kept if is_kept else replaced).append(f"{field}={shown(value)}")
    _logger.info("recipe %s sets %s", recipe.name, ", ".join(kept) or "nothing")
    if replaced:
        _logger.info("recipe %s, replaced by yours: %s", recipe.name, ", ".join(replaced))
    return merge(recipe.settings, given)


def _origins(
    recipe: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, bool]]:
    """Each field of the recipe with its value, and whether the user left it alone."""
    for name, value in recipe.items():
        mine = given.get(name, {})
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            yield from _origins(value, mine, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, name not in given
