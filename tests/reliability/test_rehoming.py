"""A version is rolled back: what waits for it goes to another one, what runs finishes, what named it is told so."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from shared import records, subjects, wire
from shared.dispatch import Dispatcher
from shared.records import Route, Version, Weight

from .conftest import Ingress, Process, Site, Stream

COMPLETIONS = "/v1/completions"
REASON = "deployment d-7 was rolled back: error_rate"


class Rollout(Site):
    """A model with the version `v`, which has a worker, and its successor `w`, which has none yet."""

    def __init__(self, site: Site) -> None:
        """Beside what `site` serves, with the same ingresses."""
        self.__dict__.update(site.__dict__)
        self.model = "rehoming"

    async def begin_rollout(self) -> None:
        """All of the traffic goes to `w`."""
        await self.route(Route(self.model, {"canary": "w"}, [Weight("v", 0), Weight("w", 10_000)], rolling=True))
        for ingress in (self.first, self.second):
            await self.until(lambda ingress=ingress: self.shares(ingress, w=100.0))

    async def register(self, name: str, state: str = "available", source: str = "") -> None:
        version = Version(model=self.model, version=name, state=state, source=source or self.source)
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(self.model, name), records.encode(version))
        await self.bus.ensure_consumer(self.model, name, subjects.LANE_FAST)

    async def roll_back(self) -> None:
        await self.route(
            Route(self.model, {"canary": "w"}, [Weight("v", 10_000)], withdrawn={"w": REASON}, rolling=False)
        )

    async def route(self, route: Route) -> None:
        await self.bus.kv_put(subjects.ROUTES_BUCKET, subjects.key(self.model), records.encode(route))

    async def shares(self, ingress: Ingress, **shares: float) -> bool:
        answer = await self.http.get(f"{ingress.url}/v1/models/{self.model}/versions")
        told = {each["version"]: each["traffic_pct"] for each in answer.json()}
        return all(told.get(version) == share for version, share in shares.items())

    async def has_state(self, ingress: Ingress, version: str, state: str) -> bool:
        answer = await self.http.get(f"{ingress.url}/v1/models/{self.model}/versions")
        return {"version": version, "state": state}.items() <= next(
            each.items() for each in answer.json() if each["version"] == version
        )

    async def waiting(self, version: str) -> int:
        """Messages that are stored for a version."""
        subject = subjects.requests_of_version(self.model, version)
        found = await self.bus.api(f"STREAM.INFO.{subjects.REQ_STREAM}", {"subjects_filter": subject})
        return sum(found["state"].get("subjects", {}).values())

    async def post(self, ingress: Ingress, prompt: str, tokens: int = 3, **headers: str) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 1}
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(ingress.url + COMPLETIONS, json=body, headers=headers)


@pytest.fixture(scope="module")
def rollout(site: Site) -> Iterator[Rollout]:
    rollout = Rollout(site)
    site.run(rollout.register("v"))
    site.run(rollout.register("w"))
    site.run(rollout.one_worker())
    yield rollout
    rollout.one.kill()
    site.run(site.both_ingresses())


async def stored(site: Rollout, version: str, count: int) -> None:
    async def there() -> bool:
        return await site.waiting(version) == count

    await site.until(there)


def test_everything_that_waits_is_answered_by_the_other_version_once(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        ingresses = (site.first, site.second)
        plain = [asyncio.create_task(site.post(ingresses[at % 2], f"queued {at}")) for at in range(100)]
        keyed = [asyncio.create_task(site.post(each, "keyed", idempotency_key="k-moves")) for each in ingresses * 2]
        named = [
            asyncio.create_task(site.post(site.first, "pinned", x_version_pin="w")),
            asyncio.create_task(site.post(site.second, "pinned", x_version_pin="w", idempotency_key="k-pinned")),
        ]
        stream = asyncio.create_task(site.begin(site.first, site.body("native", "resumable", 30), x_resumable="1"))
        await stored(site, "w", 104)  # of those with one key one
        await site.roll_back()
        answers = [*await asyncio.gather(*plain), *await asyncio.gather(*keyed)]
        assert {(each.status_code, each.headers["x-headrace-version"]) for each in answers} == {(200, "v")}
        assert len({each.content for each in answers[100:]}) == 1
        for answer in await asyncio.gather(*named):
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "no_replica_for_pin"
            assert REASON in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
        told = await stream
        assert (told.done, len(told.tokens)) == (True, 30)
        await stored(site, "w", 0)
        await site.idle()
        for ingress in ingresses:
            text = (await site.http.get(ingress.url + "/metrics")).text
            moved = f'headrace_requests_total{{code="ok",model="{site.model}",route="{COMPLETIONS}",version="v"}}'
            assert any(line.startswith(moved) for line in text.splitlines()), text
            assert f'code="ok",model="{site.model}",route="{COMPLETIONS}",version="w"' not in text
        again = await site.post(site.second, "keyed", idempotency_key="k-moves")
        assert (again.content, again.headers["x-headrace-version"]) == (answers[100].content, "v")
        for headers in ({"x_version_pin": "w"}, {"x_version_pin": "w", "idempotency_key": "k-late"}):
            late = await site.post(site.first, "late", **headers)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "no_replica_for_pin")

    site.run(work())


def test_what_waits_for_a_version_that_failed_waits_for_the_rollback(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        waiting = asyncio.create_task(site.post(site.first, "waits"))
        await stored(site, "w", 1)
        await site.register("w", "failed")
        await site.until(lambda: site.has_state(site.first, "w", "failed"))
        route = Route(site.model, {"canary": "w"}, [Weight("v", 9_999), Weight("w", 1)], rolling=True)
        await site.route(route)
        await site.until(lambda: site.shares(site.first, v=99.99))
        assert (await site.post(site.first, "new")).headers["x-headrace-version"] == "v"
        assert not waiting.done()
        await site.roll_back()
        assert (await waiting).headers["x-headrace-version"] == "v"
        await stored(site, "w", 0)
        await site.register("w")
        await site.idle()

    site.run(work())


def test_what_runs_finishes_where_it_runs(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        worker = await site.worker("w")
        left = await site.begin(site.first, site.body("native", "runs", 100), 5, x_resumable="1")
        whole = asyncio.create_task(site.begin(site.second, site.body("chat", "runs", 60)))
        await site.until(lambda: claimed(site, worker, 2))
        await site.roll_back()
        for ingress in (site.first, site.second):
            await site.until(lambda ingress=ingress: site.shares(ingress, v=100.0))
        assert (await site.post(site.first, "new")).headers["x-headrace-version"] == "v"
        await site.resume(site.second, left)
        told = await whole
        assert (left.done, len(left.tokens), left.headers["x-headrace-version"]) == (True, 100, "w")
        assert (told.done, len(told.tokens), told.headers["x-headrace-version"]) == (True, 60, "w")
        await site.idle()
        worker.kill()

    site.run(work())


async def claimed(site: Rollout, worker: Process, count: int) -> bool:
    found = await site.bus.kv_get(subjects.WORKERS_BUCKET, worker.name)
    return found is not None and records.decode_lease(found[0]).claims >= count


def test_what_killed_its_worker_before_its_first_token_moves(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.register("w", source="sim:fatal-100ms")  # the first step ends the process
        await site.begin_rollout()
        worker = await site.worker("w")
        answer = asyncio.create_task(site.post(site.first, "fatal"))
        assert await asyncio.to_thread(worker.popen.wait, 20) != 0
        assert not answer.done()
        await site.roll_back()
        assert (await answer).headers["x-headrace-version"] == "v"
        assert (await answer).headers["x-headrace-claims"] == "2"
        await stored(site, "w", 0)
        await site.register("w")
        await site.idle()

    site.run(work())


def test_a_repetition_moves_what_its_first_ingress_left_behind(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        keyed = asyncio.create_task(site.post(site.first, "left behind", idempotency_key="k-behind"))
        await stored(site, "w", 1)
        site.first.kill()
        with pytest.raises(httpx.TransportError):
            await keyed
        await site.roll_back()
        await site.until(lambda: site.shares(site.second, v=100.0))
        again = await site.post(site.second, "left behind", idempotency_key="k-behind")
        assert (again.status_code, again.headers["x-headrace-version"]) == (200, "v")
        assert again.headers["idempotent-replayed"] == "true"
        await stored(site, "w", 0)
        await site.idle()

    site.run(work())


def test_a_repetition_with_a_stale_record_finds_what_has_moved(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        first = asyncio.create_task(site.post(site.first, "stale", 150, idempotency_key="k-stale"))
        await stored(site, "w", 1)
        await site.roll_back()
        await stored(site, "w", 0)
        again = await site.post(site.second, "stale", 150, idempotency_key="k-stale")
        assert again.content == (await first).content  # drawn at random: run twice, it would be another
        await site.idle()

    site.run(work())


def test_a_stream_that_moved_is_resumed_elsewhere(rollout: Rollout) -> None:
    site = rollout

    async def work() -> None:
        await site.both_ingresses()
        await site.begin_rollout()
        stream = Stream()
        request = site.body("native", "moved", 200)
        reading = asyncio.create_task(
            site.read(stream, "POST", site.first.url + request[0], 10, json=request[1], headers={"x-resumable": "1"})
        )
        await stored(site, "w", 1)
        await site.roll_back()
        await reading
        assert len(stream.events) == 10
        site.first.kill()
        await site.resume(site.second, stream)
        assert (stream.done, len(stream.tokens)) == (True, 200)
        assert stream.headers["x-headrace-version"] == "v"
        await site.idle()

    site.run(work())


def test_what_is_published_to_a_version_that_was_withdrawn_before_moves_at_its_ack(rollout: Rollout) -> None:
    """As by an ingress that has resolved it, and learns of the change while it publishes."""
    site = rollout

    async def work() -> None:
        await site.roll_back()
        dispatcher = Dispatcher(site.bus, site.settings)
        await dispatcher.start()
        dispatcher.route_changed(Route(site.model, {}, [Weight("v", 10_000)], withdrawn={"w": REASON}))
        request = wire.Request(
            wire.new_id(), site.model, "w", wire.Input(prompt="late"), wire.Sampling(max_tokens=5), movable=True
        )
        stream = await dispatcher.submit(request, subjects.LOCAL_TENANT)
        tokens = 0
        while not stream.ended or tokens < 5:
            tokens += len(await stream.next(10))
        assert (stream.version, tokens, stream.error) == ("v", 5, None)
        await stored(site, "w", 0)
        await dispatcher.close()

    site.run(work())
