import gzip
import shutil
from pathlib import Path

import llguidance
import pytest
import tiny_tokenizers
from tiny_tokenizers import SHARED, TINY

from penstock.text.grammars.library import make_vocabulary
from penstock.text.harmony import end_ids
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """name -> folder with an unpacked tokenizer; real ones only where the shared files are."""
    root = tmp_path_factory.mktemp("tokenizers")

    def make(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        if name in TINY:
            return tiny_tokenizers.write_folder(folder, getattr(tiny_tokenizers, name)())
        if not (SHARED / name / "tokenizer.json.gz").is_file():
            pytest.skip(f"no shared tokenizer '{name}' beside this checkout")
        folder.mkdir()
        for path in (SHARED / name).iterdir():
            if path.name in ("tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(path, folder)
        with gzip.open(SHARED / name / "tokenizer.json.gz") as packed:
            (folder / "tokenizer.json").write_bytes(packed.read())
        return folder

    return make


@pytest.fixture(scope="session")
def load_tokenizer(tokenizer_folder):
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = Tokenizer.from_folder(tokenizer_folder(name))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def load_vocabulary(load_tokenizer):
    """What grammars know of a tokenizer."""
    loaded: dict[str, llguidance.LLTokenizer] = {}

    def load(name: str) -> llguidance.LLTokenizer:
        if name not in loaded:
            tokenizer = load_tokenizer(name)
            eos_ids = (*tokenizer.eos_ids, *end_ids(tokenizer))
            loaded[name] = make_vocabulary(tokenizer, tokenizer.vocab_size, eos_ids)
        return loaded[name]

    return load
