"""Every setting and limit, with its unit in its name, from `HEADRACE_*` and from `headrace.toml`.

`load()` reads, in rising precedence: the defaults below, `<data_dir>/headrace.toml`, the environment (`HEADRACE_NATS_URL`
for `nats_url`). A value that does not fit its type is a SettingsError that names the setting and its source.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared import refusals

PREFIX = "HEADRACE_"
MIB = 1 << 20
GIB = 1 << 30


class SettingsError(Exception):
    """A setting has a value that cannot be used."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of all processes; a process reads the ones it needs."""

    data_dir: str = ".headrace"
    log_level: str = "info"

    # servers
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    reuse_port: bool = False  # several ingresses may share the port: the new one is up before the old one drains
    drain_linger_s: float = 2.0  # of a drain: how long connections are still taken, for who has not noticed yet
    insecure: bool = False  # serve HTTP without keys on an address that other hosts can reach
    require_keys: bool = False  # of every request over HTTP, other than for liveness, metrics and documentation
    cors_origins: str = (
        ""  # web pages of these origins may call, e.g. "https://app.example, http://localhost:3000"; "*": any
    )
    http_tls_cert: str = ""  # a file with the certificate and its chain, PEM; "": HTTP without TLS
    http_tls_key: str = ""  # a file with its private key
    nats_url: str = "nats://127.0.0.1:4222"  # or tls://
    nats_tls_ca: str = ""  # a file with the authorities that the server's certificate is of; "": the system's
    nats_tls_cert: str = ""  # a file with the certificate that this process shows the server; "": none
    nats_tls_key: str = ""  # a file with its private key
    nats_nkey: str = ""  # a file with the seed of the user that this process is to the server; "": none
    nats_replicas: int = 1
    redis_url: str = (
        "redis://127.0.0.1:6379"  # or rediss://; "": none, and every ingress counts its part of the limits itself
    )
    redis_tls_ca: str = ""  # a file with the authorities that its certificate is of; "": the system's
    s3_endpoint: str = "http://127.0.0.1:8333"  # or https://
    s3_tls_ca: str = ""  # a file with the authorities that the store's certificate is of; "": the system's
    s3_bucket: str = "headrace"
    s3_region: str = "us-east-1"
    s3_access_key: str = ""
    s3_secret_key: str = ""
    s3_session_token: str = ""  # of temporary keys
    s3_virtual_host: bool | None = None  # the bucket in the host's name; None: on AWS, elsewhere in the path
    lifeline_fd: int | None = None  # read end of the stack's pipe: at its EOF the process ends

    # the request
    request_bytes_max: int = 8 * MIB
    request_read_s: float = 30.0  # how long the head of a request, and then its body, may take to arrive
    head_bytes_max: int = 64 * 1024  # of a request's path and headers
    http_connections_max: int = 10_000  # of one ingress; fewer where the process may not open as many files
    queue_deadline_s: float = 300.0
    generation_deadline_s: float = 600.0
    prompt_bytes_per_token_max: int = 16  # more bytes than this times the model's length are refused at once
    tenant_queue_max: int = 1000  # published and not yet accepted, per tenant and ingress
    limit_burst_s: float = 60.0  # of a tenant's limits a minute: so many seconds' worth may come at once
    limit_wait_s: float = 0.05  # how long a request waits for Redis; then this ingress decides by itself
    limit_lease_s: float = 15.0  # a request of an ingress that is gone counts as running for so long
    tokens_assumed: int = 256  # of each choice without max_tokens, until they are known
    tenant_burst: int = 32  # of one of weight 1, over all ingresses: with more waiting it has to take turns
    choices_max: int = 16
    prompts_max: int = 64  # of one request
    embedding_inputs_max: int = 2048  # of one request
    stop_strings_max: int = 4
    keepalive_s: float = 10.0
    head_hold_s: float = 1.0
    unread_tokens_max: int = 150_000  # of one stream, alternatives included: more ends it; 30 to 60 MiB
    write_stall_s: float = 60.0  # a client that takes no byte for so long counts as gone

    # the wire
    lease_ttl_s: float = 5.0
    lease_every_s: float = 1.0
    ack_wait_s: float = 5.0
    in_progress_every_s: float = 1.5
    pull_expires_s: float = 3.0
    pull_heartbeat_s: float = 1.0
    silence_s: float = 0.5
    attach_timeout_s: float = 1.0
    resend_s: float = 1.0
    seek_every_s: float = 1.0
    seek_every_max_s: float = 5.0
    orphan_grace_s: float = 15.0
    nak_hold_s: float = 2.0  # after the requester's own reconnect
    history_kept_s: float = 60.0
    idempotency_kept_s: float = 86_400.0  # a key is known for so long
    idempotency_result_bytes_max: int = 64 * 1024  # of an answer that is kept with its key
    idempotency_bytes_max: int = 512 * MIB  # of all keys and answers
    responses_kept_s: float = 3 * 86_400.0  # what /v1/responses answered with `store`
    response_bytes_max: int = 256 * 1024  # of one that is kept, with its input
    responses_bytes_max: int = 512 * MIB  # of all of them: more drop the oldest
    response_keep_wait_s: float = 1.0  # an answer waits so long until it is kept, then it says that it is not
    deaths_max: int = 4
    deliveries_max: int = 100
    dedupe_window_s: float = 120.0  # the server keeps the ids of so long in memory: at 1,000 requests/s some 30 MiB
    req_max_age_s: float = 3600.0
    req_bytes_max: int = 8 * GIB
    req_messages_per_subject_max: int = 10_000
    req_consumers_max: int = 5000
    stored_input_kept_s: float = 86_400.0  # of a request over the bus's limit: then what was left behind is removed
    job_deadline_s: float = 86_400.0  # detached work that has not ended by then ends with an error
    job_max_age_s: float = 7 * 86_400.0
    job_bytes_max: int = GIB
    job_messages_per_subject_max: int = 100_000  # of a tenant and version
    job_consumers_max: int = 5000
    job_records_bytes_max: int = 256 * MIB  # of what is known of jobs beside their requests and results
    job_ttl_s: float = 86_400.0  # a job that has ended, and its result, are kept for so long unless it says otherwise
    job_ttl_max_s: float = 3 * 86_400.0  # no longer than `result_kept_s`
    job_wait_max_s: float = 60.0  # how long one request may wait for a job's end
    tenant_jobs_max: int = 10_000  # detached requests of a tenant that have not ended
    job_patience_s: float = 2.0  # a worker hands back a job that others have kept from its batch for so long
    checkpoint_every_s: float = 1.0  # of a job, at most; of a long one less often
    result_kept_s: float = 3 * 86_400.0  # checkpoints and results of jobs
    result_bytes_max: int = 2 * GIB
    usage_kept_s: float = 90 * 86_400.0  # what each request came to, for accounting
    usage_bytes_max: int = GIB  # more drop the oldest; a request takes some 100 bytes
    audit_kept_s: float = 90 * 86_400.0  # entries of the audit log
    audit_bytes_max: int = 256 * MIB  # more drop the oldest
    fair_consumer_idle_s: float = 300.0  # the consumer of a tenant's backlog goes away after so long without use
    publish_timeout_s: float = 15.0  # an election of a stream's leader takes up to 10

    # webhooks
    webhook_private_hosts: str = ""  # hosts whose addresses may be private, with commas between; `*`: any host's
    webhook_age_max_s: float = 86_400.0  # an event that could not be told for so long is given up
    webhook_backoff_s: float = 2.0  # after the first try that failed; three times as long after each
    webhook_backoff_max_s: float = 3600.0  # a receiver's Retry-After counts up to this, too
    webhook_connect_s: float = 5.0
    webhook_answer_s: float = 15.0  # for one try, from the look-up of the name to the head of the answer
    webhook_tries_max: int = 64  # at the same time
    webhook_tries_per_tenant_max: int = 32
    webhook_tries_per_host_max: int = 8
    webhook_waiting_per_tenant_max: int = 10_000  # events that wait to be told; more are given up
    webhook_bytes_max: int = 256 * MIB  # of all that wait, and of what is kept of those that do not
    webhook_kept_s: float = 3600.0  # it is kept for so long what came of an event, for its subject's answer
    deployment_webhook_url: str = ""  # is told of every deployment; "": only webhooks of their own are
    deployment_webhook_secret: str = ""  # that it is signed with

    # files and batches
    file_bytes_max: int = 200_000_000
    files_max: int = 1000  # of a tenant
    file_uploads_max: int = (
        4  # at the same time, of one ingress, half of them of one tenant; others wait. Each takes 25 MiB
    )
    file_upload_s: float = 3600.0  # how long one may take
    batch_lines_max: int = 50_000
    batches_open_max: int = 100  # of a tenant
    batches_running_max: int = 4  # at the same time, one less of one tenant; others wait for their turn
    batch_waiting_max: int = 1000  # lines of a tenant's batches that wait for a worker, of each model: the window
    batch_ahead_max: int = 8000  # lines of a batch that are not written yet, since one before them is not done
    batch_ahead_bytes_max: int = 64 * MIB  # of those: their requests
    batch_segment_lines_max: int = 500  # results are written together
    batch_kept_s: float = 30 * 86_400.0  # the record of a batch, after its last change

    # the worker
    cache_dir: str = ""  # default: <data_dir>/cache
    cache_bytes_max: int = 64 * GIB
    fetch_retry_s: float = 60.0  # how long a worker keeps trying an object store that does not answer
    metrics_port: int = 0  # 0: a free one, named in the lease
    drain_budget_s: float = 30.0
    step_ms_max: float = 30_000.0
    torch_threads: int = 0  # 0: the cores this process may use

    # the controller
    scaler: str = "process"  # process (on this host) | kubernetes | static (others start the workers)
    devices: int = 0  # workers with a model on this host at most; 0: one on each GPU, on a CPU host one of each version
    warm_workers: int = 0  # processes that are up without a model, for whatever model comes first
    leader_ttl_s: float = 5.0  # a controller that did not renew its lead for so long has lost it
    tick_s: float = 0.25
    idle_seconds: float = 300.0
    start_seconds_max: float = 600.0
    start_failures_max: int = 3
    start_backoff_s: float = 1.0  # after a start that failed; doubles with each
    start_backoff_max_s: float = 30.0
    target_utilisation: Annotated[float, Meta(gt=0, le=1)] = 0.7  # of the slots
    jobs_clear_s: float = 600.0  # workers are added so that what waits of detached work is done within so long
    scale_down_window_s: float = 30.0  # fewer replicas only when the need was lower for this long
    turn_s: float = 60.0  # where devices are short: a version that has work and no device waits so long for a turn,
    turn_min_s: float = 30.0  # serves so long at least once it has one,
    starved_s: float = 300.0  # and waits so long where those before it have a higher priority
    retired_kept_s: float = 86_400.0  # a version that was removed is known as such for so long; then its name is free
    purge_after_s: float = 10.0  # after a version failed or retired: its requesters have ended what was parked
    worker_logs_max: int = 100
    controller_metrics_port: int = 0  # 0: a free one, named in the log

    # the controller's scaler `kubernetes`
    kubernetes_config: str = ""  # a kubeconfig file; "": the pod's service account, outside a cluster $KUBECONFIG
    kubernetes_namespace: str = ""  # where the workers run; "": the controller's own
    kubernetes_template: str = "headrace-worker"  # the PodTemplate, in that namespace, that workers are made of
    kubernetes_instance: str = "headrace"  # names the pods of this fleet: two fleets in a namespace need two names
    kubernetes_replicas_max: int = 8  # of one version that sets no limit: nodes that are added cost money
    kubernetes_call_s: float = 10.0  # how long one call may take
    kubernetes_calls_max: int = 8  # at the same time
    kubernetes_watch_s: float = 60.0  # after so long a watch is begun anew where it ended
    kubernetes_backoff_s: float = 0.5  # after a call that failed; doubles with each
    kubernetes_backoff_max_s: float = 30.0
    kubernetes_gone_s: float = 30.0  # a killed pod whose node does not confirm its end is given up after so long
    kubernetes_failed_pods_max: int = 5  # kept for their logs

    @property
    def data_path(self) -> Path:
        return Path(self.data_dir).absolute()

    @property
    def nats_shown(self) -> str:
        """`nats_url` for logs and people: what may be a password is left out."""
        return re.sub(r"//[^,]*@", "//...@", self.nats_url)

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).absolute() if self.cache_dir else self.data_path / "cache"


def given(environ: Mapping[str, str] = os.environ, **overrides: object) -> dict[str, object]:
    """What was set at all, by name and in rising precedence: file, environment, `overrides` (None means not given)."""
    names = Settings.__struct_fields__
    values: dict[str, object] = {
        name: environ[PREFIX + name.upper()] for name in names if environ.get(PREFIX + name.upper())
    }
    values |= {name: value for name, value in overrides.items() if value is not None}
    file = Path(str(values.get("data_dir", Settings().data_dir))) / "headrace.toml"
    if not file.exists():
        return values
    try:
        return tomllib.loads(file.read_text()) | values
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: {error}") from error


def load(environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
    """The settings of this process. `overrides` (from the command line) come last; None means not given."""
    try:
        settings = msgspec.convert(given(environ, **overrides), Settings, strict=False)
    except msgspec.ValidationError as error:
        name, problem = refusals.read(str(error), Settings)
        raise SettingsError(f"{_place(name, environ, overrides)}: {problem}") from error
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, int | float) and not value >= 0:
            raise SettingsError(f"{_place(name, environ, overrides)}: it must not be below 0, and is {value}")
    return settings


def _place(name: str, environ: Mapping[str, str], overrides: Mapping[str, object]) -> str:
    """Where a setting's value is from, for people; without a name, what only a file can have."""
    variable = PREFIX + name.upper()
    if overrides.get(name) is not None:
        return f"{name} of the command line"
    return f"{name} (the variable {variable})" if environ.get(variable) else f"{name} in headrace.toml".strip()


def to_environment(settings: Settings) -> dict[str, str]:
    """The settings as variables for a child process: what differs from the defaults."""
    defaults = Settings()
    return {
        PREFIX + name.upper(): str(value)
        for name in settings.__struct_fields__
        if (value := getattr(settings, name)) != getattr(defaults, name) and value is not None
    }
