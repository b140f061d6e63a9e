import sys
from pathlib import Path

UNIT = Path(__file__).parents[1]
sys.path += [str(UNIT / "text"), str(UNIT / "frontend")]
