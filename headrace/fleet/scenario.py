"""A scenario: traffic, a fleet, what goes wrong, and what has to hold. Read from TOML; times are seconds after the warm-up."""

import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.fleet import profiles
from headrace.fleet.profiles import Efficiency, Profile
from shared.errors import BadRequest
from shared.records import EngineSettings
from shared.rollouts import Gates, Seconds, Step, Strategy
from shared.settings import Settings

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]


class Length(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens, drawn for each request; `max` cuts the tail off."""

    kind: Literal["lognormal", "exponential", "uniform"] = "lognormal"
    mean: Positive
    spread: float = 1.0  # of the lognormal: the deviation of the logarithm; of the uniform: of the mean, up or down
    max: Annotated[int, Meta(ge=1)] = 4096


class Burst(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at_s: float
    seconds: Positive
    times: Annotated[float, Meta(ge=0)]  # the rate


class Traffic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one or more tenants alike.

    poisson: `rate` a second, which may have `bursts`, and follow a day of `day_s` seconds whose night has `night` of the rate.
    closed: `streams`, each with one request at a time and `think_s` after it. flood: `count` at once. trace: a `file` (CSV)
    with columns for the time in seconds, tokens in and tokens out, under the names of the Azure LLM or the BurstGPT traces.
    """

    kind: Literal["poisson", "closed", "flood", "trace"] = "poisson"
    name: str = "tenant"
    tenants: Annotated[int, Meta(ge=1)] = 1
    weight: Positive = 1.0
    priority: int = 0
    direct: bool = False  # published over NATS by its clients themselves: the lane fair is all that they have
    rate: Annotated[float, Meta(ge=0)] = 0.0
    bursts: list[Burst] = []
    day_s: Positive | None = None
    day_at_s: float = 0.0  # the time of that day when the warm-up is over; at 0 it is night
    night: Annotated[float, Meta(ge=0, le=1)] = 0.2
    streams: Count = 0
    think_s: Annotated[float, Meta(ge=0)] = 0.0
    count: Count = 0
    at_s: float = 0.0
    file: str = ""
    speed: Positive = 1.0  # of a trace
    prompt: Annotated[int, Meta(ge=1)] | Length = 500
    output: Annotated[int, Meta(ge=1)] | Length = 200
    prefix: Count = 0  # of the prompt, tokens that requests share
    prefixes: Annotated[int, Meta(ge=1)] = 1  # different ones of a tenant
    cancelled: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the requests, by their clients,
    cancelled_after_s: Positive = 2.0  # on average


class FleetSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`profile`: a100-40g-13b, a100-80g-13b, roofline (of `gpu` and `model`), or a file that `headrace bench profile` wrote."""

    workers: Annotated[int, Meta(ge=1)] = 1  # at the beginning; all along if `autoscale` is false
    ingresses: Annotated[int, Meta(ge=1)] = 1  # requests come to them at random
    profile: str = "a100-40g-13b"
    kv_dtype: str = "fp16"
    gpu: str = "a100-40g"
    model: str = "13b"
    weights: str = "fp16"
    efficiency: Efficiency = Efficiency()
    usd_per_hour: float | None = None  # of a GPU
    autoscale: bool = False
    min_workers: Count = 0
    max_workers: Count = 100_000
    jitter: Annotated[float, Meta(ge=0)] = 0.0  # mean deviation of a step's time, as a share of it
    path_ms: Annotated[float, Meta(ge=0)] = 1.5  # from a client to a worker and back, without the engine
    start_s: Annotated[float, Meta(ge=0)] | None = None  # of a worker until it serves; None: the profile's
    errors: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the requests: the engine fails them


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gpu_loss: `count` workers end. dead_worker: and nobody asks for their messages, which come back after `seconds`.
    slow_gpu: theirs take `times` as long. dead_controller, broker_pause: nothing is decided, or delivered. dead_metrics:
    the controller does not know what is in the queue.
    """

    kind: Literal["gpu_loss", "dead_worker", "slow_gpu", "dead_controller", "dead_metrics", "broker_pause"]
    at_s: float
    seconds: Positive = 1e9
    count: Count = 0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the workers; goes before count
    times: Positive = 3.0


class RolloutSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new version, `v2`, is to take over from `v1`, as `POST /v1/deployments` would have it. `fault`, what is wrong with it:

    unloadable: no worker of it ever serves. fatal: each dies of its first request. errors: `share` of its requests fail.
    ttft: the first token takes `times` as long, once a worker has the request. tpot: each step does.
    """

    at_s: float
    strategy: Strategy = "canary"
    steps: tuple[Step, ...] | None = None
    gates: Gates = Gates()
    bake_seconds: Seconds | None = None
    profile: str | None = None  # of the new version, as that of the fleet; None: the same
    max_workers: Annotated[int, Meta(ge=1)] = 10_000
    fault: Literal["none", "unloadable", "fatal", "errors", "ttft", "tpot"] = "none"
    share: Annotated[float, Meta(ge=0, le=1)] = 0.05
    times: Positive | None = None  # None: 3 of ttft, 2 of tpot
    stop_s: Annotated[float, Meta(ge=0)] | None = None  # the traffic ends so long after the rollout; None: it goes on


class Sla(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """99 of 100 requests have their first token, and their others on average, within these."""

    ttft_ms: Positive = 500.0
    tpot_ms: Positive = 30.0


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    traffic: Annotated[list[Traffic], Meta(min_length=1)]
    seed: int = 1
    seconds: Positive = 600.0
    warmup_s: Annotated[float, Meta(ge=0)] = 20.0
    fleet: FleetSpec = FleetSpec()
    engine: EngineSettings = EngineSettings()
    settings: Settings = Settings()
    sla: Sla = Sla()
    faults: list[Fault] = []
    rollout: RolloutSpec | None = None

    def profile(self) -> Profile:
        """Raises BadRequest."""
        fleet = self.fleet
        if fleet.profile in ("a100-40g-13b", "a100-80g-13b"):
            found = profiles.paper(int(fleet.profile[5:7]), fleet.kv_dtype)
        elif fleet.profile == "roofline":
            found = profiles.roofline(fleet.gpu, fleet.model, fleet.weights, fleet.kv_dtype, fleet.efficiency)
        else:
            found = profiles.measured(Path(fleet.profile))
        if fleet.usd_per_hour is not None:
            found = msgspec.structs.replace(found, usd_per_hour=fleet.usd_per_hour)
        if fleet.start_s is not None:
            found = msgspec.structs.replace(found, cold_start_s={"start": fleet.start_s})
        return found

    def new_profile(self) -> Profile:
        """Of the version that is rolled out. Raises BadRequest."""
        rollout = self.rollout or RolloutSpec(at_s=0.0)
        found = self.profile() if rollout.profile is None else self.with_fleet(profile=rollout.profile).profile()
        return profiles.slower(found, rollout.times or 2.0) if rollout.fault == "tpot" else found

    def with_fleet(self, **changes: object) -> "Scenario":
        return msgspec.structs.replace(self, fleet=msgspec.structs.replace(self.fleet, **changes))

    def with_engine(self, **changes: object) -> "Scenario":
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, **changes))

    def times_larger(self, factor: float) -> "Scenario":
        """The same with `factor` times the fleet and the traffic."""
        traffic = [
            msgspec.structs.replace(
                each,
                rate=each.rate * factor,
                streams=round(each.streams * factor),
                count=round(each.count * factor),
                speed=each.speed * factor,
            )
            for each in self.traffic
        ]
        faults = [msgspec.structs.replace(each, count=round(each.count * factor)) for each in self.faults]
        fleet = self.fleet
        grown = msgspec.structs.replace(
            fleet, workers=round(fleet.workers * factor), min_workers=round(fleet.min_workers * factor)
        )
        rollout = self.rollout
        if rollout is not None:
            rollout = msgspec.structs.replace(rollout, max_workers=max(1, math.ceil(rollout.max_workers * factor)))
        return msgspec.structs.replace(self, traffic=traffic, faults=faults, fleet=grown, rollout=rollout)


def read(file: Path) -> Scenario:
    """Raises BadRequest for what is no scenario, and says where."""
    try:
        values = tomllib.loads(file.read_text())
        values.setdefault("name", file.stem)
        return msgspec.convert(values, Scenario)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"{file}: {error}") from error
