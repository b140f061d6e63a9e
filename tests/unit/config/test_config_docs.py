"""docs/config.md is what the schema says today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "gen_config_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_lists_every_field_and_every_flag():
    from penstock.cli.flags import FLAGS
    from penstock.config.schema import EngineConfig

    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    for name in EngineConfig.model_fields:
        assert f"| `{name}` |" in page
    for flag in FLAGS:
        if flag.help or flag.ruling:
            assert f"`--{flag.names.split()[0]}`" in page
