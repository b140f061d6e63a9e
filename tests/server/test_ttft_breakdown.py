"""`benchmarks/ttft_breakdown.py` sees every stage of a request, in order."""

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "ttft_breakdown.py"


def test_every_stage_of_a_request_is_shown():
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        from ttft_trace import STAGES
    finally:
        sys.path.pop(0)
    command = [sys.executable, PROGRAM, "--requests", "20", "--block", "10", "--words", "20"]
    said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    _, completions, chat = re.split(r"\n\S+completions, us|\ncompletions, us", said.stdout)
    named = [name for name in STAGES.values() if name]
    figures = {
        line.split("|")[0].strip(): int(line.split("|")[1])
        for line in chat.splitlines()
        if "|" in line and line.split("|")[0].strip()
    }
    assert [name for name in figures if name in named] == named
    # Two processes may overlap while a message passes, so that a stage alone may take no time.
    assert all(us >= 0 for us in figures.values()), figures
    assert 0 < sum(figures[name] for name in named[2:7]) <= 10 * figures["in all"], figures
    assert "render the chat template" not in completions and "tokenize" in completions
