"""Without a GPU the Triton kernels run under Triton's interpreter, which must be asked for first.

The choice is read when Triton and the kernel modules are imported. Nothing else in the package
imports them on a CPU, so here, before this folder's tests are collected, is early enough.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton was imported before its interpreter was asked for"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
