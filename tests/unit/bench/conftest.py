"""Makes `scripted_http` importable, and runs of the benchmark quick to begin."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins with a collection, which takes half a second of the processor where it looks at
    all that this process has imported for other tests."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
