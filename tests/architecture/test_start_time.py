"""`penstock --help` answers at once: nobody waits for a library that help does not need."""

import subprocess
import sys
import time

MAX_HELP_S = 0.3


def best_of_five_s(*arguments: str) -> float:
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def test_help_takes_little_longer_than_python_itself():
    taken_s = best_of_five_s("-m", "penstock", "--help") - best_of_five_s("-c", "pass")
    assert taken_s < MAX_HELP_S
