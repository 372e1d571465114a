"""What all simulated workers of a version share, and what is counted of them."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.profiles import Profile
from headrace.fleet.workload import Request
from shared.errors import HeadraceError
from shared.records import EngineSettings
from shared.settings import Settings
from workers.engine.pacer import Cost
from workers.engine.request import TenantLimits

if TYPE_CHECKING:
    from headrace.fleet.worker import Worker

GAP_BUCKETS_PER_MS = 10


class Listener(Protocol):
    """Who is told what becomes of requests and workers."""

    def accepted(self, request: Request) -> None: ...

    def finished(self, request: Request) -> None: ...

    def refused(self, request: Request, error: HeadraceError) -> None: ...

    def gone(self, worker: "Worker") -> None: ...


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What is wrong with a version, beyond the time of its steps."""

    unloadable: bool = False  # its workers end when they would serve
    fatal: bool = False  # they die of their first request
    errors: float = 0.0  # of the requests, that fail
    ttft_times: float = 1.0  # from a request's claim to its first token


@dataclass(eq=False, kw_only=True)
class Fleet:
    """What all workers of a version share."""

    version: str

    clock: Clock
    broker: Broker
    listener: Listener
    profile: Profile
    engine: EngineSettings
    settings: Settings
    cost: Cost  # as the probe of the engine finds it
    slots: int
    blocks: int
    length_max: int  # tokens
    limits: Mapping[str, TenantLimits]  # of all tenants
    dice: random.Random
    jitter: float = 0.0
    skips: bool = True
    defect: Defect = Defect()
    gaps: dict[int, int] = field(default_factory=dict)  # tokens by the time since the one before, in buckets
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed for the first time
    cached_tokens: int = 0  # found in the prefix cache instead
    service: Counter[str] = field(default_factory=Counter)  # by tenant, of the workers that are gone
