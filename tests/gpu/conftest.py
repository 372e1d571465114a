"""Tests of the CUDA path. Without a GPU they skip, with the reason.

With TRITON_INTERPRET=1, and triton installed, those that need no more than the kernel run on the CPU: slow, and exact.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "workers" / "engine"), str(ROOT / "bench"), str(ROOT)]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("no GPU: torch.cuda is not available (TRITON_INTERPRET=1 runs this on the CPU)")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("TRITON_INTERPRET=1, but triton is not installed")
    return torch.device("cpu")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU, for what no interpreter can do."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda is not available")
    return torch.device("cuda")
