"""Models of the hub: what is read of them is downloaded, or it is said why that is not possible."""

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
from penstock.hub.pull import MODEL_FILES, WEIGHTS

# Other layouts of the same weights. Folders of sentence-transformers have a small file each.
_UNWANTED = ("*/*.safetensors", "*/*.model", "*/*.tiktoken", "*/*/*", "consolidated*")


def download(model: str, revision: str | None, weights: bool) -> Path:
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
            f"model {at} asks you to accept its license: do so on its hub page, then set HF_TOKEN"
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
            "(or HF_HUB_OFFLINE is set); check the network, or give the path of a folder"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(f"model {at}: the download failed: {error}") from error
