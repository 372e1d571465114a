"""Requests, and when they come. Everything random is drawn from the scenario's seed, for each kind of traffic apart."""

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headrace.fleet.scenario import Length, Traffic
from shared.errors import BadRequest
from shared.lanes import Place
from shared.subjects import LANE_FAST
from workers.engine.request import TenantLimits

# time, tokens in, tokens out: the Azure LLM inference traces, BurstGPT, and plain ones
COLUMNS = [
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
    ("time", "tokens_in", "tokens_out"),
]


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what became of it. Times are seconds; -1: not yet, or never."""

    number: int
    tenant: str
    limits: TenantLimits
    prompt: int  # tokens
    output: int
    stem: int  # which of its tenant's prefixes its prompt begins with,
    stem_tokens: int  # for so many tokens
    at: float
    stream: int = -1  # of a closed loop
    source: int = 0  # which traffic
    given_up_at: float = math.inf  # by its client
    version: str = ""  # that it is queued for, or that answered it
    ingress: int = 0  # which one it came to
    place: Place | None = None  # where it is queued, until it is accepted
    lane: str = LANE_FAST
    accepted: float = -1.0  # by a worker, for the first time
    admitted: float = -1.0  # into a batch
    first: float = -1.0  # token
    done: float = -1.0
    made: int = 0  # tokens handed out by workers that are gone
    claims: int = 0
    refused: str = ""


class Source:
    """The requests of one traffic of a scenario."""

    def __init__(self, traffic: Traffic, place: int, seed: int, starts: float, ends: float) -> None:
        """`starts`: when the warm-up is over; it comes from 0 until `ends`."""
        self.traffic = traffic
        self._place = place
        self._random = random.Random(f"{seed} {place} {traffic.name}")
        self._starts, self._ends = starts, ends
        names = [traffic.name] if traffic.tenants == 1 else [f"{traffic.name}-{n}" for n in range(traffic.tenants)]
        self.tenants = names
        self.limits = TenantLimits(weight=traffic.weight, priority=traffic.priority)

    def open(self) -> Iterator[Request]:
        """The requests that come at their own times, in order."""
        traffic = self.traffic
        if traffic.kind == "poisson":
            for at in self._poisson():
                yield self._request(at, self._length(traffic.prompt), self._length(traffic.output))
        elif traffic.kind == "flood":
            for _ in range(traffic.count):
                yield self._request(
                    self._starts + traffic.at_s, self._length(traffic.prompt), self._length(traffic.output)
                )
        elif traffic.kind == "trace":
            for at, prompt, output in read_trace(Path(traffic.file)):
                if (at := at / traffic.speed) >= self._ends:
                    return
                yield self._request(at, max(1, prompt), max(1, output))

    def closed(self, stream: int, now: float) -> Request:
        """The next request of a closed stream."""
        request = self._request(now, self._length(self.traffic.prompt), self._length(self.traffic.output))
        request.stream = stream
        return request

    def rate(self, at: float) -> float:
        """Requests a second at a time."""
        traffic, since = self.traffic, at - self._starts
        rate = traffic.rate
        if traffic.day_s is not None:
            height = (1 - math.cos(2 * math.pi * (traffic.day_at_s + since) / traffic.day_s)) / 2
            rate *= traffic.night + (1 - traffic.night) * height
        for burst in traffic.bursts:
            if burst.at_s <= since < burst.at_s + burst.seconds:
                rate *= burst.times
        return rate

    def _poisson(self) -> Iterator[float]:
        """By thinning: drawn at the highest rate, kept by the share of it."""
        traffic, draw = self.traffic, self._random
        highest = traffic.rate * math.prod(max(1.0, burst.times) for burst in traffic.bursts)
        steady = traffic.day_s is None and not traffic.bursts
        at = 0.0
        while highest > 0:
            at += draw.expovariate(highest)
            if at >= self._ends:
                return
            if steady or draw.random() * highest < self.rate(at):
                yield at

    def _length(self, length: int | Length) -> int:
        if isinstance(length, int):
            return length
        draw, mean = self._random, length.mean
        if length.kind == "lognormal":
            value = draw.lognormvariate(math.log(mean) - length.spread**2 / 2, length.spread)
        elif length.kind == "exponential":
            value = draw.expovariate(1 / mean)
        else:
            value = mean * draw.uniform(1 - length.spread, 1 + length.spread)
        return min(length.max, max(1, round(value)))

    def _request(self, at: float, prompt: int, output: int) -> Request:
        traffic, draw = self.traffic, self._random
        tenant = self.tenants[draw.randrange(len(self.tenants))] if len(self.tenants) > 1 else self.tenants[0]
        stem = draw.randrange(traffic.prefixes) if traffic.prefix else 0
        request = Request(
            0, tenant, self.limits, prompt, output, stem, min(traffic.prefix, prompt), at, source=self._place
        )
        if traffic.cancelled and draw.random() < traffic.cancelled:
            request.given_up_at = at + draw.expovariate(1 / traffic.cancelled_after_s)
        return request


def read_trace(file: Path) -> Iterator[tuple[float, int, int]]:
    """(seconds since the first, tokens in, tokens out) of each row. Raises BadRequest."""
    try:
        with open(file, newline="") as lines:
            rows = csv.DictReader(lines)
            known = [names for names in COLUMNS if set(names) <= set(rows.fieldnames or ())]
            if not known:
                raise BadRequest(f"{file} has none of these columns: {'; '.join(', '.join(each) for each in COLUMNS)}")
            when, tokens_in, tokens_out = known[0]
            begin: float | None = None
            for row in rows:
                at = _seconds(row[when])
                begin = at if begin is None else begin
                yield at - begin, int(row[tokens_in]), int(row[tokens_out])
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file} is no trace: {error}") from error


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()
