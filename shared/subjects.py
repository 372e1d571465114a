"""Every stream, subject, consumer and bucket name of Headrace, and the escaping of tokens in them.

No other module spells one of these. The grammar is docs/protocol.md, "Names".
"""

import hashlib
import re
from functools import lru_cache

REQ_STREAM = "REQ"
DLQ_STREAM = "DLQ"
REQ_SUBJECTS = "q.>"
DLQ_SUBJECTS = "dlq.>"
JOB_STREAM = "JOB"
JOB_SUBJECTS = "j.*.*.*"
RES_STREAM = "RES"
RES_SUBJECTS = "res.*.*.*"
USAGE_STREAM = "USAGE"
USAGE_SUBJECTS = "usage.*"
AUDIT_STREAM = "AUDIT"
AUDIT_SUBJECTS = "audit.>"

MODELS_BUCKET = "models"
ROUTES_BUCKET = "routes"
DEPLOYMENTS_BUCKET = "deployments"
ROLLOUTS_BUCKET = "rollouts"
WORKERS_BUCKET = "workers"
INGRESSES_BUCKET = "ingresses"
IDEMPOTENCY_BUCKET = "idempotency"
RESPONSES_BUCKET = "responses"
LEADER_BUCKET = "leader"
TENANTS_BUCKET = "tenants"
DECISIONS_BUCKET = "decisions"
JOBS_BUCKET = "jobs"
NOTICES_BUCKET = "notices"
WEBHOOK_SECRETS_BUCKET = "webhook_secrets"
FILES_BUCKET = "files"
BATCHES_BUCKET = "batches"

INGRESS_OWNER = "ingress"
LOCAL_TENANT = "local"
LANE_FAST = "fast"  # of tenants that have little waiting: one consumer for all of them
LANE_FAIR = "fair"  # of the others: a consumer for each
JOBS = "job"  # detached work: a consumer for each tenant

NAME_BYTES_MAX = 128
CHARACTERS_SHOWN = NAME_BYTES_MAX // 4  # of a token that is none of ours: whatever they are, they fit into a name

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_TOKEN = re.compile(r"[A-Za-z0-9_=-]{1,384}")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")


def encode_token(name: str) -> str:
    """`name` as one token, valid in NATS subjects and in KV keys: each UTF-8 byte outside [A-Za-z0-9_-] becomes `=XX`.

    Raises ValueError for an empty name and for one longer than 128 bytes.
    """
    raw = name.encode()
    if not raw or len(raw) > NAME_BYTES_MAX:
        raise ValueError(f"a name has 1 to {NAME_BYTES_MAX} bytes, this one has {len(raw)}")
    return "".join(chr(byte) if _PLAIN.match(bytes([byte])) else f"={byte:02X}" for byte in raw)


@lru_cache(maxsize=4096)
def decode_token(token: str) -> str:
    """The name that `encode_token` made `token` of. Raises ValueError for one that it never makes."""
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), token)
    name = raw.encode("latin-1").decode()
    if encode_token(name) != token:
        raise ValueError(f"not the token of a name: {token[:80]!r}")
    return name


def key(*names: str) -> str:
    """The KV key of `names`: their tokens joined by `.`."""
    return ".".join(encode_token(name) for name in names)


def names_of(kv_key: str) -> list[str]:
    """The names that `key` joined. Raises ValueError."""
    return [decode_token(token) for token in kv_key.split(".")]


def request(model: str, version: str, lane: str, tenant: str) -> str:
    """Where a request is published: `q.<model>.<version>.<lane>.<tenant>`."""
    return f"q.{encode_token(model)}.{encode_token(version)}.{lane}.{encode_token(tenant)}"


def requests_of_lane(model: str, version: str, lane: str) -> str:
    """The filter of the lane's consumer: every tenant of (model, version, lane)."""
    return f"q.{encode_token(model)}.{encode_token(version)}.{lane}.*"


def requests_of_version(model: str, version: str) -> str:
    """Every request of (model, version), whatever lane and tenant."""
    return f"q.{encode_token(model)}.{encode_token(version)}.>"


def requests_by_name(model: str, alias: str = "") -> str:
    """Where publishers that do not know the version send, whatever lane and tenant: `q.<model>.<@alias>.*.*`."""
    return f"q.{encode_token(model)}.{encode_token('@')}{encode_token(alias) if alias else ''}.*.*"


def requests_mapped(model: str, version: str) -> str:
    """Where the server's mapping of `requests_by_name` sends them on."""
    return f"q.{encode_token(model)}.{encode_token(version)}.$1.$2"


BACKLOGGED = f"q.*.*.{LANE_FAIR}.*"  # every request of the lane fair


def place_of_request(subject: str) -> tuple[str, str, str, str]:
    """(model, version, lane, tenant) of a request's subject. Raises ValueError."""
    _, model, version, lane, tenant = subject.split(".")
    return decode_token(model), decode_token(version), lane, decode_token(tenant)


def version_of_request(subject: str) -> str:
    """The version of a request's subject. Raises ValueError."""
    return decode_token(subject.split(".")[2])


def tenant_of_request(subject: str) -> str:
    """The tenant of a request's subject. Identity is the subject's token, never a header. Raises ValueError."""
    return decode_token(subject.rsplit(".", 1)[1])


def consumer(lane: str, filter_subject: str) -> str:
    """The durable consumer of a filter: `<lane>-` and 32 hex digits of blake2b(filter subject)."""
    return f"{lane}-{hashlib.blake2b(filter_subject.encode(), digest_size=16).hexdigest()}"


def fair_consumer(model: str, version: str, tenant: str) -> str:
    """The durable consumer of a tenant that is backlogged."""
    return consumer(LANE_FAIR, request(model, version, LANE_FAIR, tenant))


def is_fair(ack_subject: str) -> bool:
    """Whether what is acked there came out of the lane fair."""
    return f".{REQ_STREAM}.{LANE_FAIR}-" in ack_subject


def job(model: str, version: str, tenant: str) -> str:
    """Where detached work is published: `j.<model>.<version>.<tenant>`."""
    return f"j.{encode_token(model)}.{encode_token(version)}.{encode_token(tenant)}"


def jobs_of_version(model: str, version: str) -> str:
    """All detached work of (model, version)."""
    return f"j.{encode_token(model)}.{encode_token(version)}.*"


def jobs_of_tenant(tenant: str) -> str:
    """All detached work of a tenant."""
    return f"j.*.*.{encode_token(tenant)}"


def job_consumer(model: str, version: str, tenant: str) -> str:
    """The durable consumer of a tenant's detached work."""
    return consumer(JOBS, job(model, version, tenant))


def place_of_job(subject: str) -> tuple[str, str, str]:
    """(model, version, tenant) of such a subject. Raises ValueError."""
    _, model, version, tenant = subject.split(".")
    return decode_token(model), decode_token(version), decode_token(tenant)


def checkpoint(tenant: str, job_id: str) -> str:
    """Where it is kept how far a job has come: `res.<tenant>.<job>.checkpoint`."""
    return f"res.{encode_token(tenant)}.{encode_token(job_id)}.checkpoint"


def result(tenant: str, job_id: str) -> str:
    """Where it is kept what came of a job: `res.<tenant>.<job>.result`."""
    return f"res.{encode_token(tenant)}.{encode_token(job_id)}.result"


def results_of_job(tenant: str, job_id: str) -> str:
    """All that is kept of a job."""
    return f"res.{encode_token(tenant)}.{encode_token(job_id)}.*"


RESULTS = "res.*.*.result"
RESULTS_CONSUMER = "webhooks"  # of the controller that leads: whose webhooks are to be told of results


def place_of_result(subject: str) -> tuple[str, str]:
    """(tenant, job) of a result's subject. Raises ValueError."""
    _, tenant, job_id, _ = subject.split(".")
    return decode_token(tenant), decode_token(job_id)


def results_of_tenant(tenant: str) -> str:
    """Every result of a tenant's jobs."""
    return f"res.{encode_token(tenant)}.*.result"


def kept_of_tenant(tenant: str) -> str:
    """All that is kept of a tenant's jobs."""
    return f"res.{encode_token(tenant)}.*.*"


def dead_letter(model: str, version: str, tenant: str) -> str:
    """Where a request that was given up is kept: `dlq.<model>.<version>.<tenant>`."""
    return f"dlq.{encode_token(model)}.{encode_token(version)}.{encode_token(tenant)}"


def dead_letters_of_tenant(tenant: str) -> str:
    """All of a tenant's requests that were given up."""
    return f"dlq.*.*.{encode_token(tenant)}"


def dead_letter_of(request_subject: str) -> str:
    """Where what came on a request's subject is kept when it is no request: the same tokens, if they can be tokens of ours."""
    _, model, version, *_, tenant = request_subject.split(".")
    return f"dlq.{model}.{version}.{tenant if _TOKEN.fullmatch(tenant) else encode_token(tenant[:CHARACTERS_SHOWN])}"


def is_job(subject: str) -> bool:
    """Whether it is one of detached work."""
    return subject.startswith("j.")


def is_dead_letter(subject: str) -> bool:
    """Whether it is one of the DLQ's."""
    return subject.startswith("dlq.")


def usage(tenant: str) -> str:
    """Where it is kept what a tenant's requests came to: `usage.<tenant>`."""
    return f"usage.{encode_token(tenant)}"


def tenant_of_usage(subject: str) -> str:
    """The tenant of such a subject. Raises ValueError."""
    return decode_token(subject.rpartition(".")[2])


def audit(action: str) -> str:
    """Where an entry of the audit log is kept: `audit.<action>`, of which a part may be a filter."""
    return f"audit.{action}"


def frame_address(owner: str, client: str) -> str:
    """Where a requester process listens for accepted, frames and answers: `tok.<owner>.<client>`."""
    return f"tok.{encode_token(owner)}.{client}"


def reads_json(address: str) -> bool:
    """Whether the requester of a frame address wants JSON: its client token begins with `json-`."""
    return address.rpartition(".")[2].startswith("json-")


def may_have_frames(address: str, tenant: str) -> bool:
    """Whether what becomes of a tenant's requests may be sent to a frame address: an ingress's, or one of its own."""
    return speaks_for(address.split(".")[1], tenant)


def speaks_for(owner_token: str, tenant: str) -> bool:
    """Whether who is named by the token may speak of a tenant's requests."""
    return owner_token == INGRESS_OWNER or owner_token == encode_token(tenant)


def _said_by(owner: str | None) -> str:
    """The last token of a subject that says who speaks; NATS lets nobody write another's. None: whoever it is."""
    return "*" if owner is None else encode_token(owner)


def worker_control(worker: str, owner: str | None) -> str:
    """Where attach and release of an owner of frame addresses reach one worker; None: those of all owners."""
    return f"ctl.worker.{worker}.items.{_said_by(owner)}"


def worker_drain(worker: str) -> str:
    """Where the controller tells one worker to drain."""
    return f"ctl.worker.{worker}.drain"


def worker_assign(worker: str) -> str:
    """Where the controller tells one worker which version to serve, and whether to claim."""
    return f"ctl.worker.{worker}.assign"


def attach_broadcast(model: str, version: str, owner: str | None) -> str:
    """Where attach of an owner reaches every worker of a version; None: that of all owners."""
    return f"ctl.model.{encode_token(model)}.{encode_token(version)}.attach.{_said_by(owner)}"


def find(owner: str | None) -> str:
    """Where an owner asks who has a request: ingresses and workers answer. None: where all ask."""
    return f"ctl.requests.find.{_said_by(owner)}"


def cancel(owner: str | None) -> str:
    """Where an owner ends a request for everybody, wherever it is. None: where all do."""
    return f"ctl.requests.cancel.{_said_by(owner)}"


FIND_JOB = "ctl.jobs.find"  # who has a job? The worker that does answers
CANCEL_JOB = "ctl.jobs.cancel"  # end a job; the worker that has it answers when that is stored


SERVICES = "headrace.>"  # what any ingress does for who asks over NATS, as who asks sends it
SERVICE_CANCEL = "headrace.cancel"
SERVICE_RESUME = "headrace.resume"
SERVICE_ROUTE = "headrace.route"
SERVICE_WHOAMI = "headrace.whoami"
SERVICE_JOBS = "headrace.jobs"  # .submit, .list, .show, .events, .cancel, .delete
SERVICE_NAME = "headrace"  # by which it is discovered
_SERVICES_AS = "as.{}.headrace.>"  # the same, as it arrives from an account that is a tenant's


def service_infer(model: str) -> str:
    """Where a model is asked as a service: `headrace.infer.<model>`."""
    return f"headrace.infer.{encode_token(model)}"


def service_jobs(operation: str) -> str:
    """Where jobs are submitted and looked after."""
    return f"{SERVICE_JOBS}.{operation}"


def services_as(tenant: str | None) -> str:
    """Where what a tenant sends to `SERVICES` arrives: its account writes its name there. None: from any tenant."""
    return _SERVICES_AS.format(_said_by(tenant))


def asked_service(subject: str) -> tuple[str, list[str]]:
    """The tenant who asks and the tokens of what for, `["infer", "chat"]`. Raises ValueError for a tenant that is no name.

    Who is in no account of a tenant is the local one.
    """
    if subject.startswith("headrace."):
        return LOCAL_TENANT, subject.split(".")[1:]
    _, tenant, _, *tokens = subject.split(".")
    return decode_token(tenant), tokens


def discovery(verb: str, id: str) -> list[str]:
    """Where services of ours are discovered: `verb` is PING or INFO, `id` is of one process."""
    return [f"$SRV.{verb}", f"$SRV.{verb}.{SERVICE_NAME}", f"$SRV.{verb}.{SERVICE_NAME}.{id}"]


def wake(model: str, version: str) -> str:
    """The hint of a publisher that a version has work: core NATS. The body names tenants (shared.wakes), or is empty."""
    return f"wake.{encode_token(model)}.{encode_token(version)}"


WAKE_ALL = "wake.*.*"


def sent_by(tenant: str | None) -> list[str]:
    """All that a tenant that publishes for itself may send; None: that any may."""
    owner = _said_by(tenant)
    return [
        f"q.*.*.{LANE_FAIR}.{owner}",
        WAKE_ALL,
        worker_control("*", tenant),
        f"ctl.model.*.*.attach.{owner}",
        find(tenant),
        cancel(tenant),
    ]


def frames_of(tenant: str | None) -> str:
    """Every frame address of a tenant; None: of everybody."""
    return f"tok.{_said_by(tenant)}.*"


def version_of_wake(subject: str) -> tuple[str, str]:
    """(model, version) of a wake subject. Raises ValueError."""
    _, model, version = subject.split(".")
    return decode_token(model), decode_token(version)
