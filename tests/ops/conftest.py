"""The device the ops run on: a GPU if there is one, else the CPU and Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
