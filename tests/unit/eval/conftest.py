"""The fake engine of the front end's tests, and the scripts that make skills.jsonl."""

import sys
from pathlib import Path

UNIT = Path(__file__).parents[1]
SIBLINGS = UNIT.parents[1] / "tools" / "siblings"
sys.path += [str(UNIT / "text"), str(UNIT / "frontend"), str(SIBLINGS)]
