"""What other packages offer, by the names of their entry points."""

from importlib.metadata import entry_points
from typing import Any

from penstock.errors import ConfigError


def load_entry_point(group: str, name: str, setting: str) -> Any:
    """`setting`: where the name was given. Code runs only where a setting names it."""
    found = {one.name: one for one in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"{setting}: no installed package has an entry point '{name}' in {group}; there are: "
            f"{known}"
        )
    return found[name].load()
