"""Every Triton kernel passes the real compiler, also where there is no GPU to run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from compile_for_gpu import ARCHS

# How many variants of a kernel. All of them for all GPUs would take half an hour
# (`compile_for_gpu.py --arch ...`).
MOST = {arch: 2 if arch == 90 else 1 for arch in ARCHS}


@pytest.mark.timeout(1500)  # a minute of one core, which others may have, too
@pytest.mark.parametrize("arch", MOST)
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(arch: int, tmp_path: Path) -> None:
    """In its own process: this one may have chosen the interpreter, for good."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for_gpu.py")
    ran = subprocess.run(
        [sys.executable, str(script), f"--arch={arch}", f"--most={MOST[arch]}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "compiled" in ran.stdout
