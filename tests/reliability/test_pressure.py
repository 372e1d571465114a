"""Stores at their limits: a coded answer, and service goes on where it can."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from faults.broker import Broker
from faults.disk import small_disk

from shared import records, subjects
from shared.bus import Bus
from shared.settings import Settings

from .conftest import SETTINGS, Site, Stream


def test_a_full_queue_and_a_full_bucket_are_coded_answers(nats_server: Any, tmp_path: Path) -> None:
    limits = {"req_bytes_max": 300_000, "idempotency_bytes_max": 6_000}
    site = Site(nats_server.url, tmp_path, "pressure", "sim:zero", SETTINGS | limits)

    def ask(words: int, **headers: str) -> "asyncio.Task[httpx.Response]":
        body = {"model": site.model, "prompt": "word " * words, "max_tokens": 20}
        return asyncio.create_task(site.http.post(site.first.url + "/v1/completions", json=body, headers=headers))

    async def work() -> None:
        await site.start()
        site.first = await site.ingress()
        parked = [ask(7_000) for _ in range(8)]  # 35 kB each

        async def stored() -> bool:
            return (await site.bus.stream_info(subjects.REQ_STREAM)).messages == len(parked)

        await site.until(stored)
        refused = await ask(14_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "maximum bytes" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        await site.one_worker()
        assert {answer.status_code for answer in await asyncio.gather(*parked)} == {200}
        await site.idle()
        assert (await ask(7_000)).status_code == 200  # there is room again

        answers = [await ask(1, **{"idempotency-key": f"k{number}"}) for number in range(20)]
        codes = [answer.status_code for answer in answers]
        assert codes[0] == 200
        assert codes[-1] == 503
        error = answers[-1].json()["error"]
        assert (error["code"], "idempotency is full" in error["message"]) == ("bus_unavailable", True)
        assert "retry-after" in answers[-1].headers
        assert (await ask(1, **{"idempotency-key": "k0"})).content == answers[0].content
        assert (await ask(1)).status_code == 200  # without a key nothing has to be kept
        await site.idle()
        assert (await site.bus.stream_info(subjects.REQ_STREAM)).messages == 0

    try:
        site.run(work())
    finally:
        site.run(site.stop())
        site.runner.close()


def test_streams_fit_into_what_the_disk_has(nats_server: Any) -> None:
    config = Path(nats_server.server.directory) / "nats.conf"
    config.write_text(config.read_text().replace("jetstream {", "jetstream { max_file_store: 40MB,"))
    nats_server.kill()
    nats_server.start()

    async def work() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        try:
            for _ in range(2):  # a second process finds them as they are
                await bus.ensure()
            limits = []
            for stream in (subjects.REQ_STREAM, subjects.DLQ_STREAM, f"KV_{subjects.IDEMPOTENCY_BUCKET}"):
                config = (await bus.api(f"STREAM.INFO.{stream}"))["config"]
                limits.append(config["max_bytes"])
            assert all(limit >= 1 << 20 for limit in limits)
            assert sum(limits) <= 40 << 20
        finally:
            await bus.close()

    asyncio.run(work())


def test_a_full_disk_is_a_coded_answer_and_what_runs_goes_on(tmp_path: Path) -> None:
    limits = {"publish_timeout_s": 2.0, "history_kept_s": 60.0}

    async def work(site: Site, broker: Broker, fill: Any, free: Any) -> None:
        await site.start()
        site.first = await site.ingress()
        await site.one_worker()
        path, body = site.body("chat", "running", 600)
        wanted = await site.begin(site.first, (path, body | {"max_tokens": 30}))
        running = Stream()
        reading = asyncio.create_task(site.read(running, "POST", site.first.url + path, json=body))

        async def some() -> bool:
            return len(running.events) > 10

        await site.until(some)
        fill()
        url, ask = site.first.url + "/v1/completions", {"model": site.model, "prompt": "w " * 5000, "max_tokens": 2}
        refused = await site.http.post(url, json=ask)
        while refused.status_code == 200:  # what the server had room for in its own blocks
            refused = await site.http.post(url, json=ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_unavailable")
        assert "retry-after" in refused.headers
        assert not reading.done()
        await reading
        assert running.done
        assert running.error is None
        assert len(running.tokens) == 600
        assert running.tokens[:30] == wanted.tokens

        free()
        server = broker.nodes[
            0
        ].child  # it stores nothing more until it is started again, as the supervisor of a stack does
        server.signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait)
        await broker.start()

        async def answered() -> bool:
            return (await site.http.post(url, json=ask)).status_code == 200

        async def nothing_held() -> bool:
            lane = subjects.requests_of_lane(site.model, "v", subjects.LANE_FAST)
            info = await site.bus.consumer_info(subjects.REQ_STREAM, subjects.consumer(subjects.LANE_FAST, lane))
            lease = await site.bus.kv_get(subjects.WORKERS_BUCKET, site.one.name)
            if info is None or lease is None:
                return False
            return info.num_pending + info.num_ack_pending + records.decode_lease(lease[0]).claims == 0

        await site.until(answered)
        await site.until(
            nothing_held
        )  # what was acked while the disk was full stays stored, and is not delivered again

    try:
        with small_disk(tmp_path / "disk", 48) as disk:
            broker = Broker(tmp_path, store=disk.path / "jetstream")
            broker.start_and_wait()
            site = Site(broker.client_url, tmp_path, "disk", "sim:fixed-10ms", SETTINGS | limits)
            try:
                site.run(work(site, broker, disk.fill, disk.free))
            finally:
                site.run(site.stop())
                site.runner.close()
                broker.kill()
    except PermissionError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
