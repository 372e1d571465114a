"""The Python client: the same surface over NATS and over HTTP. docs/client.md."""

from headrace.client.client import Client
from headrace.client.generation import Generation
from headrace.client.jobs import Job, JobStatus
from headrace.client.sync import SyncClient
from headrace.client.told import Candidate, Embeddings, Result, Token, Usage
from shared.errors import HeadraceError

__all__ = [
    "Candidate",
    "Client",
    "Embeddings",
    "Generation",
    "HeadraceError",
    "Job",
    "JobStatus",
    "Result",
    "SyncClient",
    "Token",
    "Usage",
]
