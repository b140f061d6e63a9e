"""Which files a tokenizer is read from. Light: the server asks before it starts the engine."""

from pathlib import Path

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.hub.folder import has_tokenizer, local_folder

_log = log.get(__name__)


def tokenizer_folder(config: EngineConfig) -> Path | None:
    """Where the tokenizer's files are, fetched if need be. None: there shall be no tokenizer.

    Random weights need none: a folder with nothing but a config.json is enough to measure speed.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        folder = local_folder(config.model, config.revision, weights=False)
        if config.load_format == "dummy" and not has_tokenizer(folder):
            _log.warning("'%s' has no tokenizer: prompts must be token ids, as outputs are", folder)
            return None
        return folder
    given = Path(config.tokenizer).expanduser()
    return given if given.is_dir() else local_folder(config.tokenizer, weights=False)
