"""The checks of `all.py` as tests, each in its own process; `all.py` runs them without pytest.

pytest tests/gpu -k "fp8 or sampling"
"""

from pathlib import Path

import all as runner
import pytest

PARTS = [part for part in runner.parts() if part.command[0].endswith("_check.py")]


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.timeout(part.timeout_s + 30)) for part in PARTS],
    ids=lambda part: part.name.replace(" ", "-"),
)
def test_this_gpu(part: runner.Part, tmp_path: Path) -> None:
    _, wrong, _ = runner.run(part, tmp_path)
    assert not wrong, "\n".join([wrong, *runner.complaints(part, tmp_path)])
