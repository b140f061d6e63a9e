"""Where the benchmarks and the evaluation find the tokenizer of a model that somebody else runs."""

from pathlib import Path

from penstock.hub.folder import local_folder
from penstock.text.tokenizer import Tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Of a model by its name, or from a folder that need not hold more than the tokenizer."""
    given = Path(name).expanduser()
    return Tokenizer.from_folder(given if given.is_dir() else local_folder(name, weights=False))
