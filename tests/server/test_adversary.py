"""`benchmarks/adversary.py`, small: a real server among 1,000 requests of bad clients."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "adversary.py"


def test_clients_that_misbehave_leave_nothing_behind():
    command = [sys.executable, str(PROGRAM), "--requests", "1000", "--seconds", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 left running" in done.stdout and "PROBLEM" not in done.stdout
    table = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "408: " in table["send_half"] and "200: " in table["send_ahead"]
    assert "left: " in table["send_ahead_and_leave"] and "400: " in table["send_bad_body"]
