"""Conversations against any OpenAI-compatible server: `penstock bench chat`, not installed.

    python benchmarks/chat.py --port 8000 --rate 4 --seconds 60 --result_json chat.json

Runs from a checkout in the environment of another server: Python 3.11 with httptools, msgspec and
numpy is enough, all of which vLLM needs itself. `--help` lists the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from penstock.cli.main import main

if __name__ == "__main__":
    main(["bench", "chat", *sys.argv[1:]])
