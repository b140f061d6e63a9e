"""Fixtures are plain modules, importable by name from every test.

Without a GPU the Triton kernels run under Triton's interpreter. That is decided when Triton is
first imported, by whichever test comes first, so it is asked for here.

A test has one thread, and so have the programs it starts: those of another worker of the parallel
runner have the other cores, and threads that wait for each other's cores spin meanwhile.

Programs that tests start find what they need in their own environment, not in PYTHONPATH: the
parallel runner puts its own there, and one test's order would decide what another one finds.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # reads it

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("PYTHONPATH", None)
# What takes five seconds by chance, on a machine that others use, too, is no failure of ours.
_PATIENT = httpx.Timeout(240.0)
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, getattr(_PATIENT, _part))

LONGEST = "test_kernels_compile.py"  # minutes: begun last, all would wait for it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: no collection looks at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions complain in the end that somebody holds their objects


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != LONGEST)
