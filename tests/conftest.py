"""Shared by all tests: fixtures are plain modules, importable by name; paths to optional real data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
