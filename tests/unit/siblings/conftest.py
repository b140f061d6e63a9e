"""Puts tools/siblings on the import path: the tools are scripts, not a package."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "siblings"))


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizer import train_tokenizer

    return train_tokenizer(seed=0, num_examples=4000)
