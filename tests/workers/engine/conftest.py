"""The engine's tests share two modules: their folder is on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tiny models gain nothing from threads, and lose much where the cores are shared."""
    import torch

    torch.set_num_threads(1)
