"""Model name or path -> local folder or GGUF file. Downloads only what is read. Needs no torch."""

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG
from penstock.hub.gguf import SUFFIX, is_gguf
from penstock.hub.pull import MODEL_FILES, WEIGHTS, fetch_known

TINY = "tiny"  # the built-in model: part of the package, so that the server runs without a download

_UNWANTED = ("*/*", "consolidated*")  # other layouts of the same weights
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"{_NAME}(/{_NAME})?")


def local_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder, or the GGUF file, that holds `model`; fetched on first use where it is a name.

    `model` is a path, "tiny", a name of the catalogue, the name of something pulled before, or the
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
    if path.suffix == SUFFIX:
        raise ConfigError(f"model '{model}': no such file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model '{model}': no such folder, and it is not a hub id like 'org/name'"
        )
    pulled = models_home() / model
    return _checked(pulled if pulled.is_dir() else _download(model, revision, weights))


def cache_home() -> Path:
    """Where fetched and made files are kept: PENSTOCK_HOME or ~/.cache/penstock."""
    return Path(os.environ.get("PENSTOCK_HOME") or Path.home() / ".cache" / "penstock")


def models_home() -> Path:
    """Where models lie that did not come from the hub, each in a folder of its name."""
    return cache_home() / "models"


def _checked(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = list(folder.glob(f"*{SUFFIX}"))
    if len(files) == 1:
        return files[0]
    raise ConfigError(
        f"'{folder}' has no config.json; point to a folder in HF checkpoint layout, or to a "
        f"{SUFFIX} file"
    )


def _download(model: str, revision: str | None, weights: bool) -> Path:
    at = f"'{model}'" + (f" at revision '{revision}'" if revision else "")
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(MODEL_FILES),
                ignore_patterns=[*_UNWANTED, *(() if weights else (WEIGHTS,))],
            )
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"model {at} asks you to accept its licence: do so on its hub page, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model {at}: there is no such revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {at}: not a folder here, and the hub does not have it; check the spelling, "
            "or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model {at}: not a folder here, not in the hub cache, and the hub cannot be reached "
            "(or HF_HUB_OFFLINE is set); download it first, or give the path of a folder"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(f"model {at}: the download failed: {error}") from error
