"""Limits counted by several ingresses in a real Valkey, and without it."""

import asyncio
import contextlib
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from ingress.limits import Limiter, Standing
from shared.errors import ConcurrencyLimited, RequestsLimited, TokensLimited
from shared.peers import Peers
from shared.settings import Settings, SettingsError
from shared.tenants import Limits
from shared.wire import Input, Request, Sampling, Usage, new_id

INGRESSES = 3


class Fleet:
    """Limiters as of several ingress processes, on one loop."""

    def __init__(self, url: str, limits: Limits, **settings: Any) -> None:
        self.limits = limits
        self.settings = Settings(redis_url=url, **settings)
        self.streams: list[Any] = []
        self.limiters = [
            Limiter(self.settings, lambda _: self.limits, lambda: self.streams, Peers(self.settings.lease_ttl_s))
            for _ in range(INGRESSES)
        ]
        self.held: list[tuple[Limiter, str]] = []

    def start(self) -> None:
        for limiter in self.limiters:
            limiter._counters.start()
            self.hear(limiter)

    def hear(self, limiter: Limiter) -> None:
        for number in range(INGRESSES):
            limiter._peers.note(str(number), True, time.monotonic() + 1000)

    async def close(self) -> None:
        for limiter in self.limiters:
            await limiter.close()

    async def ask(self, number: int, max_tokens: int | None = 10, count: int = 1) -> Standing:
        limiter = self.limiters[number % INGRESSES]
        requests = [
            Request(new_id(), "m", "v", Input(prompt=""), Sampling(max_tokens=max_tokens)) for _ in range(count)
        ]
        standing = await limiter.take("acme", requests)
        assert standing is not None
        if standing.refusal is None:
            self.held += [(limiter, each.rid) for each in requests]
        return standing

    def end(
        self, index: int, usage: Usage | None = None, claims: int = 1, tokens: int = 0, counted: bool = True
    ) -> None:
        limiter, rid = self.held.pop(index)
        limiter.ended(stream(rid, usage, claims, tokens, counted))

    async def load(self, seconds: float, each_every_s: float) -> int:
        """Every ingress is asked evenly and all the time; how many were granted."""
        granted = 0

        async def one(number: int) -> None:
            nonlocal granted
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                standing = await self.ask(number)
                granted += standing.refusal is None
                await asyncio.sleep(each_every_s)

        await asyncio.gather(*map(one, range(INGRESSES)))
        return granted


def stream(rid: str, usage: Usage | None, claims: int = 1, tokens: int = 0, counted: bool = True) -> Any:
    return SimpleNamespace(
        rid=rid, usage=usage, claims=claims, counted=counted, requester=SimpleNamespace(tokens=tokens)
    )


def run(fleet: Fleet, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        fleet.start()
        try:
            await work()
        finally:
            await fleet.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def shown(standing: Standing) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in standing.headers}


def test_without_limits_nothing_is_asked(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(queue_max=5))

    async def work() -> None:
        assert await fleet.limiters[0].take("acme", []) is None
        assert fleet.limiters[0].headers("acme") == []

    run(fleet, work)
    assert not fleet.limiters[0]._tenants


def test_three_ingresses_hold_a_limit_to_the_request_and_go_on_evenly_without_redis(redis_server: Any) -> None:
    """1,200 a minute, of which 40 at once: 20 a second."""
    fleet = Fleet(redis_server.url, Limits(requests_per_minute=1200), limit_burst_s=2.0)

    async def work() -> None:
        start = time.monotonic()
        granted = await fleet.load(3.0, 0.01)
        ideal = 40 + (time.monotonic() - start) * 20
        assert ideal * 0.95 - 1 <= granted <= ideal + 1
        redis_server.kill()
        start = time.monotonic()
        granted = await fleet.load(3.0, 0.01)
        ideal = (time.monotonic() - start) * 20
        # each ingress goes on with the debt that Redis told last: there is not even a second burst
        assert ideal * 0.95 - INGRESSES <= granted <= ideal + INGRESSES
        assert all(limiter.alone for limiter in fleet.limiters)
        start = time.monotonic()
        await asyncio.to_thread(redis_server.start)
        await until(lambda: not any(limiter.alone for limiter in fleet.limiters))
        granted = await fleet.load(1.5, 0.01)
        ideal = (time.monotonic() - start) * 20
        # the restarted one knew nothing: it was told the debts, the highest of which counts
        assert (ideal - INGRESSES * 2) * 0.95 <= granted <= ideal + INGRESSES

    run(fleet, work)


def test_what_is_told_of_a_limit(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(requests_per_minute=60, tokens_per_minute=600))

    async def work() -> None:
        first = await fleet.ask(0, max_tokens=540)
        told = shown(first)
        assert (told["limit-requests"], told["limit-tokens"]) == ("60", "600")
        assert (told["remaining-requests"], told["remaining-tokens"]) == ("59", "60")
        assert told["reset-requests"] in ("1s", "999ms", "998ms", "997ms")
        assert told["reset-tokens"].startswith("53.") or told["reset-tokens"] == "54s"
        refused = (await fleet.ask(1, max_tokens=160)).refusal
        assert isinstance(refused, TokensLimited)
        assert refused.retry_after == pytest.approx(10.0, abs=0.3)
        refusals = [(await fleet.ask(number, max_tokens=0)).refusal for number in range(80)]
        refused = next(each for each in refusals if each is not None)
        assert isinstance(refused, RequestsLimited)
        assert refused.retry_after is not None
        assert 0 < refused.retry_after <= 1.0

    run(fleet, work)


def test_tokens_are_set_right_at_the_end_and_while_they_come(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(tokens_per_minute=100_000, requests_per_minute=1000), tokens_assumed=1000)

    async def left() -> tuple[int, int]:
        standing = await fleet.ask(0, max_tokens=0)
        fleet.held.pop()
        told = shown(standing)
        return int(told["remaining-tokens"]), int(told["remaining-requests"])

    def about(tokens: int) -> Any:
        return pytest.approx(tokens, abs=900)  # half a second's worth

    async def work() -> None:
        for _ in range(6):
            await fleet.ask(0, max_tokens=None)
        await fleet.ask(0, max_tokens=10_000)
        assert (await left())[0] == about(84_000)
        fleet.end(6, Usage(100, 400))
        assert (await left())[0] == about(93_500)  # 9,500 of 10,000 are given back
        fleet.end(0, Usage(5000, 15_000))
        assert (await left())[0] == about(74_500)  # 19,000 more
        before = (await left())[1]
        fleet.end(0, claims=0)  # cancelled before any worker had it: a request all the same
        fleet.end(0, claims=0, counted=False)  # not stored: not even that
        after = await left()
        assert after[0] == about(76_500)
        assert after[1] in (before, before + 1)  # the look took one, the refused one is back
        fleet.end(0, tokens=300)  # cancelled after 300 tokens
        assert (await left())[0] == about(77_200)
        fleet.streams.append(stream(fleet.held[0][1], None, tokens=3000))
        fleet.limiters[0]._charge_progress(time.monotonic())
        assert (await left())[0] == about(75_200)  # 2,000 over the estimate, and it goes on
        fleet.end(0, Usage(0, 3500))
        assert (await left())[0] == about(74_700)
        fleet.limiters[0].drop([fleet.held[0][1]])
        assert (await left())[0] == about(75_700)

    run(fleet, work)


def test_what_runs_is_counted_over_all_ingresses(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(concurrency=4))

    async def work() -> None:
        for number in range(4):
            assert (await fleet.ask(number)).refusal is None
        refused = (await fleet.ask(1)).refusal
        assert isinstance(refused, ConcurrencyLimited)
        assert refused.retry_after is not None
        fleet.end(0, Usage(1, 1))
        assert (await fleet.ask(0)).refusal is None  # at once, by the one that ended it
        assert (await fleet.ask(0)).refusal is not None
        fleet.end(0, Usage(1, 1))
        async with asyncio.timeout(2):
            while (await fleet.ask(2)).refusal is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert len((await fleet.ask(2)).headers) == 0  # OpenAI has none of it

    run(fleet, work)


def test_an_ingress_that_died_holds_nothing_for_long_and_one_that_lives_keeps_it(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(concurrency=2), limit_lease_s=0.5)

    async def work() -> None:
        assert (await fleet.ask(0)).refusal is None
        assert (await fleet.ask(1)).refusal is None
        assert (await fleet.ask(2)).refusal is not None
        until_s = time.monotonic() + 0.8
        while time.monotonic() < until_s:
            fleet.limiters[0]._renew()  # what its loop does; the loop of the other one has died
            await asyncio.sleep(0.1)
        assert (await fleet.ask(2)).refusal is None
        assert (await fleet.ask(2)).refusal is not None
        redis_server.kill()
        for limiter in (fleet.limiters[0], fleet.limiters[2]):
            limiter._renew()
            await until(lambda limiter=limiter: limiter.alone)
        await asyncio.to_thread(redis_server.start)
        await until(lambda: not fleet.limiters[0].alone and not fleet.limiters[2].alone)
        for limiter in (fleet.limiters[0], fleet.limiters[2]):
            keys = limiter._tenants["acme"].keys
            await limiter._counters.settle(keys, [0, 0, 500, 1, 1, 0])  # what was sent before is there
        assert (await fleet.ask(2)).refusal is not None  # a restarted one was told what runs

    run(fleet, work)


@pytest.mark.parametrize("redis", [True, False])
def test_a_limit_that_is_raised_helps_at_once(redis_server: Any, redis: bool) -> None:
    fleet = Fleet(redis_server.url if redis else "none", Limits(tokens_per_minute=300))

    async def work() -> None:
        assert (await fleet.ask(0, 30_000)).refusal is None  # more than the bucket holds: an hour and more of debt
        assert isinstance((await fleet.ask(0)).refusal, TokensLimited)
        fleet.limits = Limits(tokens_per_minute=600_000)
        standing = await fleet.ask(0)
        assert standing.refusal is None
        left = 600_000 - (30_000 + 10) * (1 if redis else INGRESSES)
        assert left <= int(shown(standing)["remaining-tokens"]) < left + 20_000
        fleet.limits = Limits(tokens_per_minute=300)
        assert (await fleet.ask(0)).refusal is None  # what was used at the higher one locks nobody out

    run(fleet, work)


def test_a_redis_that_is_full_is_one_line_of_the_log(redis_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(redis_server.url, Limits(requests_per_minute=1200), limit_burst_s=1.0)

    async def work() -> None:
        await fleet.ask(0)
        async with Redis.from_url(redis_server.url) as operator:
            await operator.config_set("maxmemory-policy", "noeviction")
            await operator.config_set("maxmemory", 1)
        start = time.monotonic()
        granted = await fleet.load(1.0, 0.02)
        assert granted <= 20 + (time.monotonic() - start) * 20 + INGRESSES
        for limiter in fleet.limiters:
            await until(lambda which=limiter: which.alone)
        assert [line.count("command not allowed") for line in caplog.messages] == [1] * INGRESSES

    run(fleet, work)


def test_a_redis_that_hangs_costs_a_few_requests_a_moment(redis_server: Any) -> None:
    fleet = Fleet(redis_server.url, Limits(requests_per_minute=60_000, concurrency=1000))

    async def work() -> None:
        for number in range(INGRESSES):
            await fleet.ask(number)
        redis_server.signal(signal.SIGSTOP)
        start = time.monotonic()
        took = []
        for _ in range(50):
            before = time.monotonic()
            assert (await fleet.ask(0)).refusal is None
            took.append(time.monotonic() - before)
        assert sorted(took)[-4] < 0.04  # three waited, nobody else
        assert time.monotonic() - start < 1.0
        redis_server.signal(signal.SIGCONT)
        await until(lambda: not fleet.limiters[0].alone)

    run(fleet, work)


def test_an_answer_that_comes_with_the_end_holds_nothing_up(redis_server: Any) -> None:
    async def main(pause_s: float) -> None:
        fleet = Fleet(redis_server.url, Limits(requests_per_minute=60_000))
        fleet.start()
        await fleet.ask(0)
        redis_server.signal(signal.SIGSTOP)
        try:
            for _ in range(4):  # three wait in vain, and then nobody does
                await fleet.ask(0)
        finally:
            redis_server.signal(signal.SIGCONT)
        await asyncio.sleep(pause_s)
        async with asyncio.timeout(10):
            await fleet.close()

    for turn in range(20):
        asyncio.run(main(turn % 5 * 0.0002))


def test_without_a_redis_each_ingress_has_its_part() -> None:
    fleet = Fleet("none", Limits(requests_per_minute=60, concurrency=7), limit_burst_s=60.0)

    async def work() -> None:
        granted = [(await fleet.ask(0)).refusal is None for _ in range(5)]
        assert granted == [True, True, False, False, False]  # 7 / 3 at the same time
        fleet.end(0, Usage(1, 1))
        assert (await fleet.ask(0)).refusal is None
        assert (await fleet.ask(1)).refusal is None
        fleet.held.pop()  # of another one
        for _ in range(17):
            fleet.end(0, Usage(1, 1))
            assert (await fleet.ask(0)).refusal is None
        fleet.end(0, Usage(1, 1))
        assert isinstance((await fleet.ask(0)).refusal, RequestsLimited)  # 60 / 3 of them

    run(fleet, work)


def test_a_url_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(SettingsError, match="redis_url"):
        Limiter(Settings(redis_url="http://x"), lambda _: Limits(), list, Peers(1.0))._counters.start()


@contextlib.asynccontextmanager
async def over_tls(server: Any, certificates: Any) -> AsyncIterator[str]:
    """The URL of a Redis that speaks TLS: the wheel's Valkey does not, so something in front of it does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.server)
    _, _, address = server.url.partition("://")
    host, _, port = address.partition(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(cast(asyncio.Task[None], asyncio.current_task()))
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        ways = [asyncio.create_task(pipe(reader, inner_writer)), asyncio.create_task(pipe(inner_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, inner_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    connections: set[asyncio.Task[None]] = set()
    front = await asyncio.start_server(serve, host, 0, ssl=context)
    try:
        yield f"rediss://{host}:{front.sockets[0].getsockname()[1]}"
    finally:
        front.close()
        await asyncio.wait_for(asyncio.gather(*connections, return_exceptions=True), 5)


@pytest.mark.parametrize("authority", ["ca", "other_ca", ""])
def test_redis_over_tls_of_a_known_authority_only(redis_server: Any, certificates: Any, authority: str) -> None:
    async def main() -> None:
        async with over_tls(redis_server, certificates) as url:
            ca = getattr(certificates, authority) if authority else ""
            fleet = Fleet(url, Limits(requests_per_minute=2), limit_wait_s=30.0, redis_tls_ca=ca)
            fleet.start()
            granted = [(await fleet.ask(number)).refusal is None for number in range(3)]
            alone = [limiter.alone for limiter in fleet.limiters]
            await fleet.close()
        assert alone == [authority != "ca"] * INGRESSES
        # two at once are all that the three may have together; without Redis each has its part, of at least one
        assert granted == [True, True, authority != "ca"]

    asyncio.run(main())
