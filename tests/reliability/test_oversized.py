"""Requests that are larger than what the bus takes: the same promises, and nothing of them is left in the object store."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from headrace.stack import ports, servers
from shared import subjects, wire
from shared.claim_check import DEAD_INPUTS, INPUTS, JOB_INPUTS, ClaimCheck
from shared.dispatch import Dispatcher
from shared.errors import ObjectsUnavailable, StreamGone, TooLarge
from shared.jobs import Jobs, Ticket
from shared.objects import ObjectStore
from shared.settings import to_environment

from ..conftest import RunningServer
from .conftest import SETTINGS, Site, Stream

MAX_PAYLOAD_BYTES = 200_000  # of the server; 134,464 of a request
WORDS = " ".join(f"{number}-{'long' * 5000}" for number in range(12))  # 240 KB, 12 tokens
REQUEST_BYTES_MAX = 600_000
TOKENS, LONG = 60, 150
INGRESS, TENANT = subjects.INGRESS_OWNER, subjects.LOCAL_TENANT


class Place(Site):
    """A site whose bus takes small messages only, with an object store of its own."""

    def __init__(self, nats_url: str, objects: RunningServer, directory: Any, settings: dict[str, Any]) -> None:
        super().__init__(nats_url, directory, "oversized", "sim:fixed-10ms", settings)
        self.server = objects
        self.objects = ObjectStore(self.settings)

    def stored(self, *places: str) -> list[str]:
        return [each.key for place in places or (INPUTS, JOB_INPUTS) for each in self.objects.list(f"{place}/")]

    async def emptied(self) -> None:
        """Wait until nothing is queued or held, and no input is left."""

        async def empty() -> bool:
            return not self.stored()

        await self.idle()
        await self.until(empty)

    async def reading(self, requests: list[Any], **headers: str) -> tuple[list[Stream], "asyncio.Future[Any]"]:
        """New streams, each with a few tokens, and what ends with them."""
        streams = [Stream() for _ in requests]
        reads = [
            self.read(stream, "POST", self.first.url + path, json=body, headers=headers)
            for stream, (path, body) in zip(streams, requests, strict=True)
        ]
        ended = asyncio.gather(*reads)

        async def begun() -> bool:
            return all(len(stream.tokens) > 5 for stream in streams)

        await self.until(begun)
        return streams, ended

    async def plain(self, ingress: Any, prompt: str = WORDS, tokens: int = TOKENS, **headers: str) -> httpx.Response:
        path, body = self.body("text", prompt, tokens)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(ingress.url + path, json=body | {"stream": False}, headers=headers)


@pytest.fixture(scope="module")
def place(start_server: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("oversized")
    described = servers.nats(directory / "nats", ports.free_ports(1)[0])
    config = directory / "nats" / "nats.conf"
    config.write_text(config.read_text().replace(str(servers.MAX_PAYLOAD_BYTES), str(MAX_PAYLOAD_BYTES)))
    nats = start_server(described, servers.nats_ready, [])
    keys, chosen = (secrets.token_hex(10), secrets.token_hex(20)), servers.ObjectPorts(*ports.free_ports(5))
    described = servers.objects(directory / "objects", chosen, *keys)
    objects = start_server(described, servers.s3_ready, servers.object_sockets(chosen))
    place = Place(
        nats.url,
        objects,
        directory,
        SETTINGS
        | {"s3_endpoint": objects.url, "s3_access_key": keys[0], "s3_secret_key": keys[1]}
        | {"request_bytes_max": REQUEST_BYTES_MAX, "fetch_retry_s": 1.5, "redis_url": ""}
        | {"checkpoint_every_s": 0.2},
    )
    place.objects.ensure_bucket()
    try:
        place.run(place.start())
        place.run(place.both_ingresses())
        place.run(place.one_worker())
        yield place
    finally:
        place.run(place.stop())
        place.runner.close()
        objects.kill()
        nats.kill()


def test_every_route_serves_them_and_a_worker_that_dies_is_not_noticed(place: Place) -> None:
    async def work() -> None:
        requests = [place.body(route, WORDS, TOKENS) for route in ("chat", "text", "native")]
        whole = await asyncio.gather(*(place.begin(place.first, request) for request in requests))
        assert [(each.done, len(each.tokens)) for each in whole] == [(True, TOKENS)] * 3
        plain = (await place.plain(place.second)).json()
        assert plain["choices"][0]["text"] == "".join(whole[1].tokens)
        assert plain["usage"]["prompt_tokens"] == 12
        other = await place.begin(place.first, place.body("text", WORDS.replace("7-long", "7-lang"), TOKENS))
        assert other.tokens != whole[1].tokens  # it is the input that was read
        await place.emptied()

        streams, ended = await place.reading(requests)
        assert len(place.stored()) == 3
        place.one.kill()
        place.one = await place.worker()
        await ended
        assert [each.tokens for each in streams] == [each.tokens for each in whole]
        await place.emptied()
        too_large = await place.plain(place.first, WORDS * 3)
        assert too_large.status_code == 413
        assert f"the limit is {REQUEST_BYTES_MAX} bytes" in too_large.json()["error"]["message"]

    place.run(work())


def test_a_resumable_one_goes_on_elsewhere_and_a_key_runs_it_once(place: Place) -> None:
    async def work() -> None:
        request = place.body("chat", WORDS, 100)
        whole = await place.begin(place.second, request)
        [stream], ended = await place.reading([request], x_resumable="true")
        place.first.kill()
        await ended
        assert not stream.done
        await place.resume(place.second, stream, len(stream.events) + 10)
        place.one.kill()  # the next worker reads the input again, for who came later
        place.one = await place.worker()
        await place.resume(place.second, stream)
        assert (stream.done, stream.tokens) == (True, whole.tokens)
        await place.both_ingresses()
        await place.emptied()

        ingresses = (place.first, place.second)
        keyed = await asyncio.gather(*(place.plain(each, tokens=20, idempotency_key="k") for each in ingresses * 3))
        assert {each.status_code for each in keyed} == {200}
        assert len({each.content for each in keyed}) == 1
        again = await place.plain(place.first, tokens=20, idempotency_key="k")
        assert (again.content, again.headers["idempotent-replayed"]) == (keyed[0].content, "true")
        reused = await place.plain(place.second, WORDS + " more", tokens=20, idempotency_key="k")
        assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
        await place.emptied()

    place.run(work())


def test_what_ends_in_the_queue_leaves_nothing(place: Place) -> None:
    async def work() -> None:
        place.one.kill()
        hasty = await place.ingress(queue_deadline_s=0.5)
        late = await place.plain(hasty)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_deadline")
        left = asyncio.create_task(place.plain(place.first))
        cancelled, jobs = Stream(), Jobs(place.bus)
        url, (path, body) = place.first.url, place.body("chat", WORDS, 5)
        headers = {"x-resumable": "true"}
        reading = asyncio.create_task(place.read(cancelled, "POST", url + path, json=body, headers=headers))
        ticket = await jobs.submit(asked(), "a")

        async def all_there() -> bool:
            return len(place.stored()) == 3 and cancelled.id != ""

        await place.until(all_there)
        left.cancel()
        answer = await place.http.post(f"{place.second.url}/v1/streams/{cancelled.id.split('.')[0]}/cancel")
        assert answer.json()["status"] == "cancelled"
        await reading
        assert await jobs.cancel(ticket)
        await place.emptied()
        place.one = await place.worker()

    place.run(work())


def asked(prompt: str = WORDS, tokens: int = TOKENS, rid: str = "") -> wire.Request:
    sampling = wire.Sampling(max_tokens=tokens, temperature=0.0)
    return wire.Request(rid or wire.new_id(), "oversized", "v", wire.Input(prompt=prompt), sampling)


async def text_of(jobs: Jobs, ticket: Ticket) -> str:
    result = await jobs.wait(ticket, 60)
    assert result.error is None
    return "".join(result.parts[0].text)


def test_a_job_is_done_though_its_worker_dies(place: Place) -> None:
    async def work() -> None:
        jobs = Jobs(place.bus)
        whole = await text_of(jobs, await jobs.submit(asked(tokens=LONG), "a"))
        assert len(whole.split()) == LONG
        ticket = await jobs.submit(asked(tokens=LONG), "a")

        async def begun() -> bool:
            return await jobs.checkpoint(ticket) is not None

        await place.until(begun)
        place.one.kill()
        assert await jobs.result(ticket) is None
        place.one = await place.worker()
        assert await text_of(jobs, ticket) == whole
        await place.emptied()

    place.run(work())


def test_without_the_store_a_large_request_is_refused_a_job_waits_and_small_ones_are_served(place: Place) -> None:
    async def work() -> None:
        place.one.kill()
        queued, jobs = asyncio.create_task(place.plain(place.first)), Jobs(place.bus)
        ticket, small = await jobs.submit(asked(), "a"), await jobs.submit(asked("small"), "a")

        async def there() -> bool:
            return len(place.stored()) == 2

        await place.until(there)
        place.server.kill()
        refused = await place.plain(place.second)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, ObjectsUnavailable.code)
        assert int(refused.headers["retry-after"]) >= 1
        keyed = await place.plain(place.second, idempotency_key="k-away")
        assert keyed.status_code == 503
        place.one = await place.worker()
        assert (await place.plain(place.second, "small", 3)).status_code == 200  # the other ones hold nobody up
        assert await text_of(jobs, small)
        answer = await queued  # after `fetch_retry_s`
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, ObjectsUnavailable.code)
        assert await jobs.result(ticket) is None
        await asyncio.to_thread(place.server.start)
        assert len((await text_of(jobs, ticket)).split()) == TOKENS
        await place.until(lambda: takes_writes(place))  # some seconds after its reads
        await place.idle()
        await place.until(lambda: jobs_inputs_gone(place))
        assert len(place.stored()) == 1  # it could not be removed: the sweep's
        place.objects.remove(place.stored()[0])
        keyed = await place.plain(place.second, tokens=5, idempotency_key="k-away")  # it was not used
        assert keyed.status_code == 200, keyed.text
        assert keyed.json()["usage"]["completion_tokens"] == 5
        await place.emptied()

    place.run(work())


def test_a_reference_to_what_is_not_the_senders_own_gets_it_nothing(place: Place) -> None:
    async def work() -> None:
        place.one.kill()
        owner = Dispatcher(place.bus, place.settings)
        await owner.start()
        stream = await owner.submit(asked(), "victim")
        [stored] = place.stored()
        message = await place.bus.next_message(subjects.REQ_STREAM, place.queue, 1)
        assert message is not None
        request = wire.decode_request(message.data, {})
        assert request.stored is not None
        thief = Dispatcher(place.bus, place.settings, "thief")  # with the same rid, and all that the message says
        await thief.start()
        with pytest.raises(TooLarge, match=f"the bus's limit of {MAX_PAYLOAD_BYTES - 65_536} bytes"):
            await thief.submit(asked(), "thief")
        other, same = wire.new_id(), request.rid
        forged = [
            await thief.submit(wire.Request(rid, *named(), wire.Input(), request.sampling, stored=reference), "thief")
            for rid, reference in (
                (same, request.stored),
                (other, request.stored),
                (wire.new_id(), wire.StoredInput(INPUTS, "0" * 32, 3, "0" * 64)),
                (wire.new_id(), wire.StoredInput(INPUTS, "0" * 32, 1 << 40, "0" * 64)),
            )
        ]
        place.one = await place.worker()
        for each in forged[1:3]:
            with pytest.raises(StreamGone, match="no longer in the object store"):
                await each.next(20)
        with pytest.raises(TooLarge, match=str(4 * REQUEST_BYTES_MAX)):
            await forged[3].next(20)
        assert len(await read(stream)) == TOKENS  # its owner is served
        forged[0].cancel()  # two tenants with one rid: it is in the DLQ, or came late and found nothing either
        await place.until(lambda: empties(place, stored))
        for dispatcher in (owner, thief):
            await dispatcher.close()
        body = wire.encode(request).replace(request.stored.id.encode(), b"../../victim/".ljust(32, b"x"))
        for number, data in enumerate((body, wire.encode(request).replace(b"input\x80", b"input\x81\xa6prompt\xa1x"))):
            await place.bus.publish_durable(
                subjects.request(*named(), subjects.LANE_FAST, "thief"),
                data,
                message_headers(f"hostile{number}", "tok.ingress.nobody"),
            )
        await place.until(lambda: buried(place, "thief", {"hostile0", "hostile1"}))
        await place.emptied()

    place.run(work())


def test_one_that_is_given_up_is_kept_whole_and_can_be_run_again(place: Place) -> None:
    async def work() -> None:
        dispatcher = Dispatcher(place.bus, place.settings)
        await dispatcher.start()
        first = await dispatcher.submit(asked("small", 6000), "first")
        assert await first.next(20)
        # it has a message id of its own, since the stream drops a second message of the first one's
        second = subjects.request(*named(), subjects.LANE_FAST, "second")
        headers = message_headers(wire.new_id(), "tok.ingress.nobody")
        await ClaimCheck(place.bus).publish(second, wire.encode(asked(rid=first.rid)), headers)

        async def kept() -> bool:
            return await buried(place, "second", {f"{first.rid}.dlq"})

        await place.until(kept)
        first.cancel()
        await dispatcher.close()
        await place.emptied()
        assert len(place.stored(DEAD_INPUTS)) == 1
        status, output = await headrace(place, "dlq", "list", "--json")
        [letter] = [each for each in json.loads(output) if each["rid"] == first.rid]
        assert (status, letter["tenant"]) == (0, "second")
        assert letter["input"].endswith("in the object store")
        status, output = await headrace(place, "dlq", "show", str(letter["seq"]), "--body", "--json")
        assert (status, json.loads(output)["body"]["prompt"]) == (0, WORDS)
        status, output = await headrace(place, "dlq", "requeue", str(letter["seq"]), "--body")
        assert status == 0, output
        assert f"{TOKENS} tokens" in output
        assert place.stored(DEAD_INPUTS) == []
        await place.emptied()

    place.run(work())


async def headrace(place: Place, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "--data", place.settings.data_dir, *arguments),
        env=os.environ | to_environment(place.settings),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def named() -> tuple[str, str]:
    return "oversized", "v"


async def jobs_inputs_gone(place: Place) -> bool:
    return not place.stored(JOB_INPUTS)


async def takes_writes(place: Place) -> bool:
    try:
        await asyncio.to_thread(place.objects.put, "probe", b"-")
        await asyncio.to_thread(place.objects.remove, "probe")
    except ObjectsUnavailable:
        return False
    return True


async def empties(place: Place, stored: str) -> bool:
    return stored not in place.stored()


async def buried(place: Place, tenant: str, message_ids: set[str]) -> bool:
    """Whether these messages are in the DLQ."""
    found, sequence = set(), 1
    subject = subjects.dead_letter(*named(), tenant)
    while (message := await place.bus.next_message(subjects.DLQ_STREAM, subject, sequence)) is not None:
        found.add(message.headers[wire.HEADER_MSG_ID])
        sequence = message.seq + 1
    return message_ids <= found


def message_headers(message_id: str, reply: str) -> dict[str, str]:
    return {
        wire.HEADER_MSG_ID: message_id,
        wire.HEADER_WIRE: wire.WIRE_VERSION,
        wire.HEADER_REPLY: reply,
        wire.HEADER_TTL: "60",
    }


async def read(stream: Any) -> list[int]:
    ids: list[int] = []
    try:
        while True:
            ids += [token for delta in await stream.next(20) for token in delta.ids]
    except StopAsyncIteration:
        return ids
