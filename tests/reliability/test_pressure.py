"""Stores at their limits: a coded answer, and service goes on where it can."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from shared import subjects
from shared.bus import Bus
from shared.settings import Settings

from .conftest import SETTINGS, Site


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
        for _ in range(2):  # a second process finds them as they are
            await bus.ensure()
        limits = []
        for stream in (subjects.REQ_STREAM, subjects.DLQ_STREAM, f"KV_{subjects.IDEMPOTENCY_BUCKET}"):
            config = (await bus.api(f"STREAM.INFO.{stream}"))["config"]
            limits.append(config["max_bytes"])
        assert all(limit >= 1 << 20 for limit in limits)
        assert sum(limits) <= 40 << 20
        await bus.close()

    asyncio.run(work())
