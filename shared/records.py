"""What the KV buckets hold. One writer each: the registry (models, routes), a worker (its lease), the controller
(decisions); ingresses (idempotency)."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.encoders import Encoder
from shared.stored import Stored, json
from shared.wire import Logprob, Request, Usage, WireError

SLOTS_MAX = 65_536
BLOCKS_MAX = 1 << 22  # 64 Mi tokens
TARGET_MS_MAX = 24 * 3600 * 1e3
REPLICAS_MAX = 10_000  # of a version: each that is missing is a step of every tick

WINDOWS_MAX = 64  # of a version's schedule

STABLE = "stable"  # the alias of the version that has the traffic
ALL_TRAFFIC = 10_000  # basis points

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
TargetMs = Annotated[float, Meta(gt=0, le=TARGET_MS_MAX)]
Replicas = Annotated[int, Meta(ge=0, le=REPLICAS_MAX)]
TimeOfDay = Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$")]  # HH:MM


class EngineSettings(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How a version is served; `--set NAME=VALUE` of `headrace models push`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int, Meta(ge=1)] | None = None  # tokens; None: the model's own
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] | None = None  # sequences in a batch; None: from memory
    kv_blocks: Annotated[int, Meta(ge=1, le=BLOCKS_MAX)] | None = None  # blocks of 16 tokens; None: from memory
    prefill_chunk: Annotated[int, Meta(ge=1)] = 512  # prompt tokens in one step at most
    tpot_ms_target: TargetMs | None = None  # for 99 of 100 tokens; None: 30 on a GPU, else no bound
    ttft_ms_target: TargetMs | None = None  # None: none
    slots_reserved_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1  # and of KV blocks: out of any one tenant's reach
    prefix_cache: Literal["tenant", "shared", "off"] = "tenant"  # shared by all: what others ask can be timed
    speculation: Literal["ngram", "off"] = "ngram"  # on a CPU: drafts from the text itself, verified several at a step
    engine: Literal["headrace", "vllm"] = "headrace"  # vllm: another engine behind the same protocol, an optional extra
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1  # GPUs that share the model; more than one with engine=vllm only
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"  # of keys and values: the model's, or fewer bits on a GPU
    weights: Literal["auto", "int8"] = "auto"  # in the model's type, or int8 on a CPU by our own kernels
    kernels: Literal["auto", "torch"] = "auto"  # on a CPU: our own where they fit, or torch's
    attention: Literal["auto", "triton", "varlen", "torch"] = "auto"  # on a GPU
    tool_dialect: Literal["auto", "hermes", "llama3", "mistral"] = (
        "auto"  # how the model writes tool calls; by its template
    )


class Window(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """A time of the week, in UTC, with more workers than otherwise. One that ends before it begins ends on the next day."""

    days: tuple[Day, ...] = DAYS  # on which it begins
    from_: TimeOfDay = msgspec.field(name="from")
    to: TimeOfDay
    min_replicas: Replicas


class VersionLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a version gets. Changed at run time, other than the version's files."""

    min_replicas: Replicas = 0
    max_replicas: Replicas | None = None  # None: as many as there are devices
    warm: Replicas = 0  # workers that are loaded and claim nothing until they are needed
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # where devices are short, the higher goes first
    idle_seconds: Annotated[float, Meta(ge=0)] | None = None  # None: the controller's setting
    schedule: Annotated[tuple[Window, ...], Meta(max_length=WINDOWS_MAX)] = ()


class Version(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A version of a model, in the bucket `models` under key(model, version).

    `source` and `manifest_sha256` say what it is and never change; the manifest holds the engine settings as pushed.
    """

    model: str
    version: str
    state: str  # registered | available | failed | retired
    source: str  # "sim:<profile>", or "s3": files and manifest are in the object store
    manifest_sha256: str = ""
    max_model_len: int = 0  # tokens, for early refusals
    engine: EngineSettings = EngineSettings()
    limits: VersionLimits = VersionLimits()
    tool_dialect: str = ""  # by its chat template; "": not known
    encoder: Encoder | None = None  # it makes vectors; None: it generates text
    created: int = 0  # unix seconds
    reason: str = ""  # why it failed
    retired: int = 0  # unix seconds of its removal


class Weight(msgspec.Struct, frozen=True, array_like=True):
    version: str
    basis_points: Annotated[int, Meta(ge=0, le=10_000)]


class Route(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model's plain name and its aliases resolve, in the bucket `routes` under key(model)."""

    model: str
    aliases: dict[str, str]
    weights: list[Weight]  # in basis points, 10,000 together
    withdrawn: dict[
        str, str
    ] = {}  # versions that were rolled back, and why: nothing new goes to them, not by a pin either
    deployment: str = ""  # the last one that wrote this
    serial: int = 0  # and as of which of its changes
    rolling: bool = False  # that one goes on


class Lease(msgspec.Struct, kw_only=True):
    """What a worker says of itself every second, in the bucket `workers` under its id, with a TTL."""

    worker: str
    model: str
    version: str
    state: str  # warm (no model yet) | starting | loaded (claims nothing) | active | draining | failed
    pid: int
    host: str
    started: float  # unix seconds
    device: str = ""  # as CUDA_VISIBLE_DEVICES names it
    metrics_port: int = 0
    reason: str = ""  # of failed
    permanent: bool = False  # of failed: another try cannot help
    slots: int = 0
    running: int = 0  # sequences in the batch
    waiting: int = 0  # claimed, not in the batch
    claims: int = 0  # messages held that are not acked
    jobs: int = 0  # of detached work
    blocks_used: int = 0
    blocks_total: int = 0
    busy_at: float = 0.0  # unix seconds when it last held a claim
    fetched_bytes: int = 0  # of its files, while they are fetched
    fetch_bytes: int = 0  # of all its files; 0: nothing is fetched
    cold_start: dict[str, float] = {}  # seconds by phase: process, imports, fetch, load, first_token
    config: str = ""  # the digest of the engine settings that it was loaded with


class Signals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a scaling decision rests on. None: not known."""

    pending: int | None = None  # messages that no worker has
    claimed: int | None = None  # that a worker has, and has not acked
    jobs: int = 0  # messages of detached work
    stranded: int = 0  # of the claimed, those that no live worker tells of
    unbatched: int = 0  # of the claimed, those that wait in a worker for its batch
    oldest_s: float = 0.0  # how long the oldest pending message has waited
    rate: float | None = None  # requests that come in a second
    service_s: float | None = None  # that a request holds a slot
    cold_start_s: float | None = None  # of a worker of this version, as measured
    saturation: float | None = None  # claims by slots of the active workers
    slots: int = 0  # of a worker
    replicas: int = 0  # there are, starting or active
    spares: int = 0  # there are


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of what a version should have, in the history of the bucket `decisions` under key(model, version)."""

    at: float  # unix seconds
    model: str
    version: str
    before: int  # replicas that were desired until then
    desired: int
    spares: int = 0
    reasons: list[str]  # the last one decided
    signals: Signals = Signals()


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who has an office, in the bucket `leader`, with a TTL: the controller that leads, the ingress that runs the batches."""

    host: str
    pid: int
    process: str  # which process of that pid: pids are used again


class KeptChoice(msgspec.Struct, array_like=True):
    """One choice of an answer, token by token."""

    ids: list[int]
    text: list[str]
    logprobs: list[Logprob] | None
    finish: str | None
    vector: bytes = b""


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


VERSIONS = Stored(json(Version), "the record of a version", lambda each: (each.model, each.version), 2)
ROUTES = Stored(json(Route), "the route of a model", lambda each: (each.model,))
LEASES = Stored(json(Lease), "the lease of a worker", lambda each: (each.worker,))
DECISIONS = Stored(json(ScalingDecision), "a scaling decision", lambda each: (each.model, each.version), 2)
LEADERS = Stored(json(Leader), "the record of the leader")
KEY_RECORDS = Stored(msgspec.msgpack.Decoder(KeyRecord).decode, "the record of an idempotency key", count=2)

decode_version, version_at = VERSIONS.decode, VERSIONS.at
decode_route, route_at = ROUTES.decode, ROUTES.at
decode_lease, lease_at = LEASES.decode, LEASES.at
decision_at = DECISIONS.at
decode_leader = LEADERS.decode
decode_key_record = KEY_RECORDS.decode
