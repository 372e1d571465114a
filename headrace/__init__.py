"""What a person runs and imports: the CLI, the Python client, the local stack.

from headrace import Client
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import Client, Embeddings, Generation, HeadraceError, Job, Result, SyncClient, Token

__all__ = ["Client", "Embeddings", "Generation", "HeadraceError", "Job", "Result", "SyncClient", "Token"]


def __getattr__(name: str) -> Any:
    """The client comes with the first use of it: the commands do without."""
    if name in __all__:
        return getattr(import_module("headrace.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
