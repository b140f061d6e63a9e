"""The benchmark of drafting, of a tiny model on a CPU: what is drawn right is kept, and counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "speculative.py"


def test_drafts_that_are_always_right_are_all_kept(tmp_path):
    found = tmp_path / "found.json"
    flags = ["--rows", "tiny", "--engine", "drafting", "--right", "1", "--drafts", "3"]
    flags += ["--concurrency", "1", "--prompt", "16", "--tokens", "13", "--output", str(found)]
    subprocess.run([sys.executable, str(SCRIPT), *flags], check=True)
    figures = json.loads(found.read_text())
    assert figures["forced"]["1"]["per_decode"] == pytest.approx(4)
    assert all(figures["costs"]["drafting"])
