"""`penstock --help` answers at once, and a first request: nobody waits for libraries unneeded."""

import subprocess
import sys
import time
from pathlib import Path

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


FIRST_ANSWER = """
import sys
from local_engine import LocalEngine
engine = LocalEngine("tiny", device="cpu")
known = set(sys.modules)
engine.generate([[5, 6, 7]] * 2, 4)
engine.generate([[5, 6, 7]] * 2, 4, temperature=1.0, top_p=0.9, logprobs=2, seed=1)
new = sorted(set(sys.modules) - known)
assert len(new) < 20, new[:20]
"""


def test_a_first_answer_imports_next_to_nothing():
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    script = f"import sys; sys.path.insert(0, {fixtures!r})\n{FIRST_ANSWER}"
    subprocess.run([sys.executable, "-c", script], check=True)
