"""Parts of `benchmarks/goals.py` by scripts that stand for benchmarks."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import goals
from goals import Goal, Part, at

GOALS = (Goal("speed", at("speed"), 10, is_least=True), Goal("wait", at("wait"), 5))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Of one part whose script does `code` with `sys.argv`; what the whole says."""

    def run(code: str, *flags: str, seconds: float = 20.0) -> str:
        script = tmp_path / "script.py"
        script.write_text(f"import json, sys, time\n{code}\n")
        monkeypatch.setattr(goals, "PARTS", (Part("part", (str(script),), seconds, GOALS),))
        goals.main(["--folder", str(tmp_path / "found"), *flags])
        return capsys.readouterr().out

    return run


WRITES = "open(sys.argv[2], 'w').write(json.dumps({'speed': 12, 'wait': 7}))"


def test_figures_are_met_or_missed(run, tmp_path):
    assert "| speed | 12 | >= 10 | met |" in run(WRITES)
    table = (tmp_path / "found" / "goals.md").read_text()
    assert "| wait | 7 | <= 5 | MISSED |" in table


def test_what_was_measured_is_not_measured_again(run, tmp_path):
    run(WRITES)
    assert "12" in run("raise SystemExit('again')")
    assert json.loads((tmp_path / "found" / "part.json").read_text())["speed"] == 12


def test_a_part_that_fails_says_why_and_is_tried_again(run):
    assert "ended with 1" in (said := run("sys.exit('no memory')")) and "no memory" in said
    assert "| speed | 12 |" in run(WRITES)


def test_a_part_that_is_too_slow_is_ended(run, tmp_path):
    assert "too slow" in run("time.sleep(600)", seconds=0.4)
    assert not (tmp_path / "found" / "part.json").exists()


def test_a_part_that_might_not_end_in_time_is_left(run):
    assert "left for the next time" in run(WRITES, "--seconds", "10")


def test_every_script_is_there():
    assert all((goals.HERE / part.command[0]).exists() for part in goals.PARTS)
