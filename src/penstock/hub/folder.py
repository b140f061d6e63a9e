"""Model name or path -> local folder or GGUF file. Downloads only what is read. Needs no torch."""

import os
import re
from pathlib import Path

from penstock.errors import ConfigError, did_you_mean
from penstock.hub.catalog import CATALOG
from penstock.hub.files import has_file
from penstock.hub.gguf_file import SUFFIX, is_gguf
from penstock.hub.pull import fetch_known

TINY = "tiny"  # the built-in model: part of the package, so that the server runs without a download

_TOKENIZER = "tokenizer.json"
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"{_NAME}(/{_NAME})?")


def local_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder, or the GGUF file, that holds `model`; fetched on first use where it is a name.

    `model` is a path, "tiny", a name of the catalog, the name of something pulled before, or the
    id of a hub model. With `weights=False` a hub model's small files are enough: configuration and
    tokenizer.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path.resolve())
    if is_gguf(path):
        return path.resolve()
    if model == TINY:
        return _checked(Path(__file__).with_name(TINY))
    if model in CATALOG:
        return fetch_known(model, CATALOG[model], models_home())
    if path.suffix == SUFFIX and not has_file(path):
        raise ConfigError(f"model '{model}': no such file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model '{model}': no such folder, and it is not a hub id like 'org/name'"
        )
    pulled = models_home() / model
    if pulled.is_dir():
        return _checked(pulled)
    from penstock.hub.download import download  # the hub's library takes long to import

    try:
        return _checked(download(model, revision, weights))
    except ConfigError as error:
        if "/" in model:
            raise
        known = known_names()
        if near := did_you_mean(model, known):  # first: the rest is long
            raise ConfigError(f"model '{model}'{near} ({error})") from error
        raise ConfigError(f"{error}; short names are {', '.join(known)}") from error


def known_names() -> list[str]:
    """What can be asked for by a short name: the built-in model, the catalog, what was pulled."""
    home = models_home()
    pulled = [one.name for one in home.iterdir() if one.is_dir()] if home.is_dir() else []
    own = [name for name in pulled if not name.startswith(".")]  # those are downloads under way
    return sorted({TINY, *CATALOG, *own})


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer can be read from there."""
    return is_gguf(folder) or has_file(folder / _TOKENIZER)


def cache_home() -> Path:
    """Where fetched and made files are kept: PENSTOCK_HOME or ~/.cache/penstock."""
    return Path(os.environ.get("PENSTOCK_HOME") or Path.home() / ".cache" / "penstock")


def models_home() -> Path:
    """Where models lie that did not come from the hub, each in a folder of its name."""
    return cache_home() / "models"


def _checked(folder: Path) -> Path:
    if has_file(folder / "config.json"):
        return folder
    files = list(folder.glob(f"*{SUFFIX}"))
    if len(files) == 1 and has_file(files[0]):
        return files[0]
    raise ConfigError(
        f"'{folder}' has no config.json; point to a folder in HF checkpoint layout, or to a "
        f"{SUFFIX} file"
    )
