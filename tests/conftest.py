"""Fixtures are plain modules, importable by name from every test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
