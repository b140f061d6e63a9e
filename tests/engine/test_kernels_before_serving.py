"""Once an engine serves, no step needs a kernel that was not compiled at its start.

A kernel takes up to seconds to compile, and all running answers wait for it. Shown on a fake device
that notes launches (`recorded_launches`); on a GPU, an engine warns of a kernel that comes late.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ("tiny", "tiny-fp8", "tiny-moe", "tiny-oss", "tiny-next")
LIKE_REAL_ONES = ("many-r1", "many-r1-eager", "many-r1-nvfp4", "wide-next")
FOLDERS = [ROOT / "tests" / "fixtures", ROOT / "benchmarks"]


@pytest.fixture(scope="module")
def ran() -> "subprocess.CompletedProcess[str]":
    """In a process without Triton's interpreter, which knows nothing of compiled kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS)), "OMP_NUM_THREADS": "1"}
    script = FOLDERS[0] / "kernels_while_serving.py"
    return subprocess.run(
        [sys.executable, str(script), *MODELS, *LIKE_REAL_ONES],
        capture_output=True, text=True, env=environment, timeout=1200, check=True,
    )  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("model", MODELS + LIKE_REAL_ONES)
def test_no_kernel_is_new_once_requests_come(
    model: str, ran: "subprocess.CompletedProcess[str]"
) -> None:
    lines = ran.stdout.splitlines()
    assert f"{model} ended with 0" in lines, ran.stderr[-3000:]
    assert not [line for line in lines if line.startswith(f"{model}: ")]
