"""The fronts of tests/ingress: the real application, fed by the test; and a model for embeddings beside the demo model."""

from typing import Any

import pytest

from ..ingress.conftest import front, make, raw, shared_front, start_front

__all__ = ["front", "make", "raw", "shared_front", "start_front"]


@pytest.fixture(scope="session")
def embedder(demo_stack: Any) -> str:
    """A model on the stack of the demo model that makes embeddings."""
    demo_stack.push("sim:embedder", "vectors")
    return "vectors"
