"""Fixtures are plain modules, importable by name from every test.

Without a GPU the Triton kernels run under Triton's interpreter. That is decided when Triton is
first imported, by whichever test comes first, so it is asked for here.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
