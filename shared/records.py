"""What the KV buckets hold. One writer each: the registry (models, routes), a worker (its lease); ingresses (idempotency)."""

import msgspec

from shared.wire import Logprob, Request, Usage, WireError


class EngineSettings(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How a version is served; `--set NAME=VALUE` of `headrace models push`."""

    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    max_model_len: int | None = None  # tokens; None: the model's own
    slots: int | None = None  # sequences in a batch; None: from memory
    kv_blocks: int | None = None  # blocks of 16 tokens; None: from memory
    prefill_chunk: int = 512  # prompt tokens in one step at most
    engine: str = "headrace"  # headrace | vllm: another engine behind the same protocol, an optional extra
    kv_dtype: str = "auto"  # of keys and values: auto (the model's) | int8 | fp8 (on a GPU)
    kernels: str = "auto"  # on a CPU: auto (our own where they fit) | torch
    attention: str = "auto"  # on a GPU: auto | triton | varlen | torch


class VersionLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    min_replicas: int = 0
    max_replicas: int | None = None  # None: as many as there are devices
    idle_seconds: float | None = None  # None: the controller's setting


class Version(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A version of a model, in the bucket `models` under key(model, version). Immutable but for state and reason."""

    model: str
    version: str
    state: str  # registered | available | failed | retired
    source: str  # "sim:<profile>", or "s3" with the manifest beside the files
    manifest_sha256: str = ""
    max_model_len: int = 0  # tokens, for early refusals
    engine: EngineSettings = EngineSettings()
    limits: VersionLimits = VersionLimits()
    created: int = 0  # unix seconds
    reason: str = ""  # why it failed


class Weight(msgspec.Struct, frozen=True, array_like=True):
    version: str
    basis_points: int


class Route(msgspec.Struct, frozen=True):
    """How a model's plain name and its aliases resolve, in the bucket `routes` under key(model)."""

    model: str
    aliases: dict[str, str]
    weights: list[Weight]  # in basis points, 10,000 together


class Lease(msgspec.Struct, kw_only=True):
    """What a worker says of itself every second, in the bucket `workers` under its id, with a TTL."""

    worker: str
    model: str
    version: str
    state: str  # starting | active | draining | failed
    pid: int
    host: str
    started: float  # unix seconds
    metrics_port: int = 0
    reason: str = ""  # of failed
    permanent: bool = False  # of failed: another try cannot help
    slots: int = 0
    running: int = 0  # sequences in the batch
    waiting: int = 0  # claimed, not in the batch
    claims: int = 0  # messages held that are not acked
    blocks_used: int = 0
    blocks_total: int = 0
    busy_at: float = 0.0  # unix seconds when it last held a claim
    cold_start: dict[str, float] = {}  # seconds by phase: process, imports, fetch, load, first_token


class KeptChoice(msgspec.Struct, array_like=True):
    """One choice of an answer, token by token."""

    ids: list[int]
    text: list[str]
    logprobs: list[Logprob] | None
    finish: str | None


class Outcome(msgspec.Struct, array_like=True):
    """What a request came to: its answer, or the error that a repetition would meet again."""

    choices: list[KeptChoice]
    usage: Usage | None
    claims: int
    error: WireError | None = None
    too_large: bool = False  # there was an answer, and it is not kept


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request that an idempotency key stands for, in the bucket `idempotency` under key(tenant, hash of the key)."""

    digest: bytes  # of what was asked
    request: Request  # without its input
    created: float  # unix seconds
    seq: int = 0  # of its message; 0: not published as far as is known
    outcome: Outcome | None = None  # None: not answered as far as is known


encode = msgspec.json.encode
encode_key_record = msgspec.msgpack.Encoder().encode


def decode_key_record(raw: bytes) -> KeyRecord:
    return msgspec.msgpack.decode(raw, type=KeyRecord)


def decode_version(raw: bytes) -> Version:
    return msgspec.json.decode(raw, type=Version)


def decode_route(raw: bytes) -> Route:
    return msgspec.json.decode(raw, type=Route)


def decode_lease(raw: bytes) -> Lease:
    return msgspec.json.decode(raw, type=Lease)
