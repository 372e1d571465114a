"""A tenant's limits: requests and tokens a minute, and how many requests run. Counted in Redis for all ingresses; without it
each ingress counts its part of them.

A request takes a piece of each limit before it is published: tokens by an estimate. What it came to is set right while it runs
and when it ends. Tenants without limits cost nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ingress.answers import Headers
from ingress.counters import Answer, Counters
from ingress.gcra import Bucket, Rate
from shared import subjects
from shared.background import end
from shared.errors import ConcurrencyLimited, HeadraceError, RequestsLimited, TokensLimited
from shared.peers import Peers
from shared.settings import Settings
from shared.tenants import Limits
from shared.wire import Request

if TYPE_CHECKING:
    from shared.stream import Stream

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4  # of a prompt, to estimate with
SWEEP_S = 1.0
RENEWALS = 3  # of a lease, within its time
HELD_MARGIN_S = 60.0  # on top of a request's own deadlines
RUN_UNKNOWN_S = 1.0  # how long a tenant's requests run, before one has ended
RETRY_MIN_S, RETRY_MAX_S = 0.1, 30.0
MICROSECONDS = 1e6
NONE, REQUESTS, TOKENS, RUNNING = range(4)  # which limit refuses

Stay = Callable[[], "Iterable[Stream]"]


class Hold(msgspec.Struct):
    """What one request has of its tenant's limits."""

    tenant: "_Tenant"
    since: float  # monotonic
    prompt_tokens: int  # estimated
    tokens: int  # taken
    counted: bool  # in Redis


class _Tenant:
    """What is known here of a tenant with limits."""

    def __init__(self, name: str, limits: Limits) -> None:
        token = subjects.encode_token(name)
        self.keys = [f"headrace:{{{token}}}:{what}" for what in ("requests", "tokens", "running")]
        self.limits = limits
        self.requests, self.tokens = Bucket(), Bucket()
        self.running: set[str] = set()  # rids
        self.run_s = RUN_UNKNOWN_S
        self.alone = False  # it took something since Redis was asked last
        self.requests_due = self.tokens_due = 0  # to be added in Redis
        self.over: list[str] = []  # to be let go of


class Standing(msgspec.Struct, frozen=True):
    """What a request was told of its tenant's limits."""

    headers: Headers
    refusal: HeadraceError | None = None


class Limiter:
    """The limits of one ingress's requests. `limits_of` says what a tenant may have, `streams` what is open."""

    def __init__(self, settings: Settings, limits_of: Callable[[str], Limits], streams: Stay, peers: Peers) -> None:
        self._settings, self._limits_of, self._streams, self._peers = settings, limits_of, streams, peers
        self._counters = Counters(settings, self._on_connected)
        self._tenants: dict[str, _Tenant] = {}
        self._holds: dict[str, Hold] = {}  # by rid
        self._unsettled: set[_Tenant] = set()
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Count with the others. Raises SettingsError."""
        self._counters.start()
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await end(self._loop_task)
        self._settle()
        await self._counters.close()

    @property
    def alone(self) -> bool:
        """Whether this ingress counts its part by itself."""
        return not self._counters.usable

    # -- a request -------------------------------------------------------------------------------------------------------

    async def take(self, name: str, requests: list[Request]) -> Standing | None:
        """A piece of each limit of a tenant, for requests that are about to be published; None: it has no limits.

        Whatever was taken is let go of by `ended` or `drop`.
        """
        return await self._take(name, requests, runs=True)

    async def _take(self, name: str, requests: list[Request], runs: bool) -> Standing | None:
        """`runs`: it counts to what runs at the same time."""
        limits = self._limits_of(name)
        if limits.requests_per_minute is None and limits.tokens_per_minute is None and limits.concurrency is None:
            return None
        tenant = self._tenant(name, limits)
        now = time.monotonic()
        holds = {each.rid: self._estimated(tenant, each, now) for each in requests}
        answer = await self._ask(tenant, holds, runs) if self._counters.usable else None
        now = time.monotonic()
        if answer is not None:
            tenant.alone = False
            refused, requests_us, tokens_us, running, late_us = answer
            tenant.requests.put(requests_us / MICROSECONDS, now)
            tenant.tokens.put(tokens_us / MICROSECONDS, now)
            late_s = late_us / MICROSECONDS
        else:
            refused, late_s, running = self._take_part(tenant, holds, runs, now)
        if refused == NONE:
            for hold in holds.values():
                hold.counted = answer is not None
            self._holds |= holds
            tenant.running |= holds.keys()
        return Standing(self._headers(tenant, now), self._refusal(tenant, refused, late_s, running))

    async def spend(self, name: str, request: Request) -> Standing | None:
        """As `take`, for a request that nobody waits for: what was estimated is spent, and it runs beside those that run."""
        standing = await self._take(name, [request], runs=False)
        hold = self._holds.get(request.rid)
        if hold is not None:
            self._let_go(request.rid, hold, hold.tokens, 0)
        return standing

    def headers(self, name: str) -> Headers:
        """Where a tenant stands as far as is known here, for an answer that takes nothing."""
        tenant = self._tenants.get(name)
        return [] if tenant is None else self._headers(tenant, time.monotonic())

    def drop(self, rids: Iterable[str]) -> None:
        """They were not published: all of it is given back, unless they have ended."""
        for rid in rids:
            hold = self._holds.get(rid)
            if hold is not None:
                self._let_go(rid, hold, 0, 1)

    def ended(self, stream: "Stream") -> None:
        """A request has ended, however it did."""
        hold = self._holds.get(stream.rid)
        if hold is None:
            return
        tenant = hold.tenant
        if stream.usage is not None:
            tenant.run_s += (time.monotonic() - hold.since - tenant.run_s) / 8
            self._let_go(stream.rid, hold, stream.usage.prompt_tokens + stream.usage.completion_tokens, 0)
        elif stream.claims:
            self._let_go(stream.rid, hold, hold.prompt_tokens + stream.requester.tokens, 0)
        else:  # nothing of it was computed; it is a request all the same, if it was stored
            self._let_go(stream.rid, hold, 0, 0 if stream.counted else 1)

    def _tenant(self, name: str, limits: Limits) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, limits)
        if tenant.limits != limits:  # what is owed is requests and tokens: at a higher limit it takes less time
            now = time.monotonic()
            for bucket, before, after in zip(
                (tenant.requests, tenant.tokens), _per_minute(tenant.limits), _per_minute(limits), strict=True
            ):
                bucket.put(bucket.debt_s(now) * min(1.0, before / after), now)
            tenant.limits = limits
        return tenant

    def _estimated(self, tenant: _Tenant, request: Request, now: float) -> Hold:
        sampling, given = request.sampling, request.input
        if given.embedding is not None:
            sizes = [
                len(each) * (1 if isinstance(each, list) else 1 / BYTES_PER_TOKEN) for each in given.embedding.inputs
            ]
            prompt_tokens = int(sum(sizes))
        elif given.token_ids is not None:
            prompt_tokens = len(given.token_ids)
        elif given.prompt is not None:
            prompt_tokens = len(given.prompt) // BYTES_PER_TOKEN
        else:
            messages = given.messages or []
            prompt_tokens = sum(len(message.content or "") for message in messages) // BYTES_PER_TOKEN
        output = self._settings.tokens_assumed if sampling.max_tokens is None else sampling.max_tokens
        return Hold(tenant, now, prompt_tokens, prompt_tokens + output * sampling.n, False)

    async def _ask(self, tenant: _Tenant, holds: dict[str, Hold], runs: bool) -> Answer:
        """Redis's answer; None when there is none in time."""
        self._settle()  # what was given back before counts before
        requests, tokens = self._rates(tenant)
        now = time.monotonic()
        cost_tokens = sum(hold.tokens for hold in holds.values())
        arguments = [
            int(self._settings.limit_burst_s * MICROSECONDS),
            0 if requests is None else requests.cost_s(len(holds)) * MICROSECONDS,
            0 if tokens is None else max(tokens.cost_s(cost_tokens) * MICROSECONDS, 1),
            (tenant.limits.concurrency or 0) if runs else 0,
            int(self._settings.limit_lease_s * 1000),
            int(tenant.requests.debt_s(now) * MICROSECONDS) if tenant.alone else 0,
            int(tenant.tokens.debt_s(now) * MICROSECONDS) if tenant.alone else 0,
            *_per_minute(tenant.limits),
            *holds,
        ]
        answer = self._counters.take(tenant.keys, arguments)
        try:
            async with asyncio.timeout(self._counters.wait_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._counters.vain()
            answer.add_done_callback(partial(self._late, tenant, holds))
            return None
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._late, tenant, holds))
            raise

    def _late(self, tenant: _Tenant, holds: dict[str, Hold], future: asyncio.Future[Answer]) -> None:
        """Redis answered when nobody waited any more."""
        answer = None if future.cancelled() else future.result()
        if answer is None:
            return
        granted = answer[0] == NONE
        for rid, hold in holds.items():
            if rid in self._holds:  # it was granted here
                hold.counted = True
                if not granted:
                    tenant.requests_due += 1
                    tenant.tokens_due += hold.tokens
            elif granted:  # it was refused here, or has ended
                tenant.requests_due -= 1
                tenant.tokens_due -= hold.tokens
                tenant.over.append(rid)
        self._unsettled.add(tenant)
        self._settle()

    # -- this ingress's part -----------------------------------------------------------------------------------------------

    def _take_part(self, tenant: _Tenant, holds: dict[str, Hold], runs: bool, now: float) -> tuple[int, float, int]:
        """Which limit refuses, in how many seconds it would grant, and how many run here."""
        requests, tokens = self._rates(tenant)
        ingresses, running = 1, len(tenant.running)
        if not self._counters.usable:  # else Redis was asked, and will know: `_late`
            tenant.alone = True
            ingresses = self._peers.count(now)
        requests_s = 0.0 if requests is None else requests.cost_s(len(holds)) * ingresses
        tokens_s = 0.0 if tokens is None else tokens.cost_s(sum(each.tokens for each in holds.values())) * ingresses
        if requests is not None and (late_s := requests.late_s(tenant.requests.debt_s(now), requests_s)):
            return REQUESTS, late_s, running
        if tokens is not None and (late_s := tokens.late_s(tenant.tokens.debt_s(now), tokens_s)):
            return TOKENS, late_s, running
        if runs and tenant.limits.concurrency is not None:
            part = self._peers.part(tenant.limits.concurrency, now)
            if running + min(len(holds), part) > part:
                return RUNNING, 0.0, running
        tenant.requests.add(requests_s, now)
        tenant.tokens.add(tokens_s, now)
        return NONE, 0.0, running

    def _rates(self, tenant: _Tenant) -> tuple[Rate | None, Rate | None]:
        limits, burst_s = tenant.limits, self._settings.limit_burst_s
        requests = None if limits.requests_per_minute is None else Rate(limits.requests_per_minute, burst_s)
        return requests, None if limits.tokens_per_minute is None else Rate(limits.tokens_per_minute, burst_s)

    # -- setting it right ----------------------------------------------------------------------------------------------------

    def _let_go(self, rid: str, hold: Hold, tokens: int, requests_back: int) -> None:
        """A request came to `tokens`."""
        del self._holds[rid]
        tenant = hold.tenant
        tenant.running.discard(rid)
        tenant.over.append(rid)
        self._charge(hold, tokens - hold.tokens, -requests_back)

    def _charge(self, hold: Hold, tokens: int, requests: int = 0) -> None:
        """Take more than was taken, or give back."""
        tenant = hold.tenant
        hold.tokens += tokens
        if self._counters.usable:
            # what was taken of this ingress's part came to Redis as a debt, if at all: nothing is given back for it there
            tenant.requests_due += requests if hold.counted else 0
            tenant.tokens_due += tokens if hold.counted else max(0, tokens)
            if not self._unsettled:
                asyncio.get_running_loop().call_soon(self._settle)
            self._unsettled.add(tenant)
            return
        tenant.over.clear()  # it ends there with its lease
        now, counts = time.monotonic(), (requests, tokens)
        ingresses = self._peers.count(now)
        for rate, bucket, count in zip(self._rates(tenant), (tenant.requests, tenant.tokens), counts, strict=True):
            if rate is not None:
                bucket.add(rate.cost_s(count) * ingresses, now)

    def _settle(self) -> None:
        """Tell Redis what has changed."""
        unsettled, self._unsettled = self._unsettled, set()
        for tenant in unsettled:
            self._tell(tenant, [])

    def _tell(self, tenant: _Tenant, running: list[str]) -> None:
        requests, tokens = self._rates(tenant)
        arguments = [
            0 if requests is None else requests.cost_s(tenant.requests_due) * MICROSECONDS,
            0 if tokens is None else tokens.cost_s(tenant.tokens_due) * MICROSECONDS,
            int(self._settings.limit_lease_s * 1000),
            *_per_minute(tenant.limits),
            len(tenant.over),
            *tenant.over,
            *running,
        ]
        tenant.requests_due = tenant.tokens_due = 0
        tenant.over = []
        self._counters.settle(tenant.keys, arguments)

    def _renew(self) -> None:
        """Say of everything that runs here that it still does."""
        for tenant in self._tenants.values():
            if tenant.limits.concurrency is not None and tenant.running:
                self._tell(tenant, list(tenant.running))

    def _on_connected(self) -> None:
        """A Redis that was restarted knows of nothing."""
        self._renew()

    async def _run(self) -> None:
        renew_at = 0.0
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            if not self._holds:
                continue
            self._charge_progress(now)
            if now >= renew_at:
                renew_at = now + self._settings.limit_lease_s / RENEWALS - SWEEP_S
                self._renew()

    def _charge_progress(self, now: float) -> None:
        """Take more for requests that have come to more than was estimated, and let go of what nobody ended."""
        for stream in list(self._streams()):
            hold = self._holds.get(stream.rid)
            if hold is not None:
                more = hold.prompt_tokens + stream.requester.tokens - hold.tokens
                if more > 0:
                    self._charge(hold, more)
        settings = self._settings
        held_s = settings.queue_deadline_s + settings.generation_deadline_s + settings.orphan_grace_s + HELD_MARGIN_S
        for rid, hold in list(self._holds.items()):
            if now - hold.since > held_s:
                log.error("request %s has not ended: it is no longer counted", rid)
                self._let_go(rid, hold, hold.tokens, 0)

    # -- what clients are told -----------------------------------------------------------------------------------------------

    def _headers(self, tenant: _Tenant, now: float) -> Headers:
        headers: Headers = []
        for name, rate, bucket in zip(
            (b"requests", b"tokens"), self._rates(tenant), (tenant.requests, tenant.tokens), strict=True
        ):
            if rate is not None:
                debt_s = bucket.debt_s(now)
                headers += [
                    (b"x-ratelimit-limit-" + name, b"%d" % rate.limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % rate.remaining(debt_s)),
                    (b"x-ratelimit-reset-" + name, duration(debt_s).encode()),
                ]
        return headers

    def _refusal(self, tenant: _Tenant, refused: int, late_s: float, running: int) -> HeadraceError | None:
        limits = tenant.limits
        if refused == REQUESTS:
            return RequestsLimited(
                f"the limit of {limits.requests_per_minute} requests a minute is reached", retry_after=late_s
            )
        if refused == TOKENS:
            return TokensLimited(
                f"the limit of {limits.tokens_per_minute} tokens a minute is reached, prompts included",
                retry_after=late_s,
            )
        if refused == RUNNING:
            wait_s = min(max(tenant.run_s / max(1, running), RETRY_MIN_S), RETRY_MAX_S)
            return ConcurrencyLimited(
                f"{limits.concurrency} requests at the same time are the limit", retry_after=wait_s
            )
        return None


def _per_minute(limits: Limits) -> tuple[int, int]:
    """The rates; 1: none."""
    return limits.requests_per_minute or 1, limits.tokens_per_minute or 1


def duration(seconds: float) -> str:
    """As OpenAI's headers have it: `120ms`, `8.64s`, `6m0s`, `1h0m5s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    if minutes:
        hours, minutes = divmod(minutes, 60)
        text = f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
    return text
