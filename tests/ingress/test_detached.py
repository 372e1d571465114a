"""Requests that nobody waits for: their admission, and how they become jobs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from ingress.context import Context
from ingress.detached import Detached, Order, admit_detached, family_at
from ingress.family import decode_framing
from ingress.identity import LOCAL, Caller, Identities
from ingress.keys import Keys
from ingress.registrar import Registrar
from ingress.routes.chat import Chat
from ingress.routes.completions import Completions
from ingress.routes.embeddings import Embeddings
from ingress.routes.infer import Infer
from shared import encoders, job_records, job_status, subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.errors import (
    BadRequest,
    ContextLength,
    HeadraceError,
    ModelNotAllowed,
    ModelNotFound,
    QueueFull,
    Unsupported,
    WrongTask,
)
from shared.router import Router
from shared.settings import Settings
from shared.tenants import ApiKey

RID = "0123456789abcdef0123456789abcdef"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOO_LONG = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 10**30}}}
ORDER = Order(endpoint="/v1/chat/completions", deadline_s=60, keep_s=60)


def with_context(make: Any, nats_url: str, work: Callable[[Context], Awaitable[None]], **changed: Any) -> None:
    async def run() -> None:
        settings = Settings(nats_url=nats_url, redis_url="", **changed)
        bus = await Bus.connect(settings, "test")
        try:
            await bus.ensure()
            router = Router()
            router.put_version(make.version())
            router.put_route(make.route(("v1", 10_000), stable="v1"))
            identities, keys, registrar = Identities(False), Keys(bus, settings), Registrar(bus, settings)
            dispatcher = Dispatcher(bus, settings)
            await work(Context(settings, router, dispatcher, keys, registrar, lambda: True, identities, Detached(bus)))
        finally:
            await bus.close()

    asyncio.run(run())


def admitted(
    context: Context, body: Any, path: str = "/v1/chat/completions", caller: Caller = LOCAL, **more: Any
) -> Any:
    family = family_at((Chat(), Completions(), Infer(), Embeddings()), path)
    return admit_detached(context, family, msgspec.json.encode(body), caller, RID, path=path, **more)


def test_a_detached_request_is_what_its_route_would_publish(nats_server: Any, make: Any) -> None:
    async def work(context: Context) -> None:
        found = admitted(context, CHAT | {"n": 2, "max_tokens": 5, "seed": 3}, created=77)
        request = found.request
        assert (request.rid, request.model, request.version, request.movable) == (RID, "m", "v1", True)
        assert (request.sampling.n, request.sampling.max_tokens, request.sampling.seed) == (2, 5, 3)
        assert request.input.messages == [wire.ChatMessage("user", "Hi")]
        assert decode_framing(request.framing) == found.framing
        assert (found.framing.route, found.framing.reference, found.created) == ("/v1/chat/completions", "m", 77)
        again = [admitted(context, CHAT).request.sampling.seed for _ in range(2)]
        assert again[0] == again[1], "submitted again, it draws the same tokens"
        pinned = admitted(context, {"input": "Hi", "stream": True}, "/v1/models/m@stable/infer")
        assert (pinned.request.version, pinned.request.movable, pinned.reference) == ("v1", False, "m@stable")

    with_context(make, nats_server.url, work)


def test_inputs_to_embed_are_one_job_whatever_their_number(nats_server: Any, make: Any) -> None:
    async def work(context: Context) -> None:
        context.router.put_version(make.version("v1", "vectors", encoder=encoders.simulated(encoders.SIMULATED)))
        context.router.put_route(make.route(("v1", 10_000), model="vectors", stable="v1"))
        body = {"model": "vectors", "input": ["text"] * 128, "dimensions": 8, "encoding_format": "base64"}
        found = admitted(context, body, "/v1/embeddings")
        assert found.parts == []
        assert found.request.input == wire.Input(embedding=wire.Embedding(["text"] * 128, 0, 8))
        assert (found.request.sampling.n, found.framing.base64) == (128, True)
        with pytest.raises(Unsupported, match="at most 128 inputs a job, got 129") as caught:
            admitted(context, body | {"input": ["text"] * 129}, "/v1/embeddings")
        assert caught.value.param == "input"
        with pytest.raises(WrongTask):
            admitted(context, body | {"model": "m"}, "/v1/embeddings")

    with_context(make, nats_server.url, work)


def test_a_detached_request_is_refused_as_its_route_would(nats_server: Any, make: Any) -> None:
    only_other = Caller("a", ApiKey(id="k", sha256="", models=("other",)), "k")
    cases: list[tuple[type[HeadraceError], Any, str, Caller]] = [
        (BadRequest, CHAT | {"temperature": 9}, "/v1/chat/completions", LOCAL),
        (BadRequest, CHAT, "/v1/embeddings-of-no-kind", LOCAL),
        (ModelNotFound, CHAT | {"model": "no"}, "/v1/chat/completions", LOCAL),
        (ModelNotAllowed, CHAT, "/v1/chat/completions", only_other),
        (ContextLength, CHAT | {"max_tokens": 100_000}, "/v1/chat/completions", LOCAL),
        (Unsupported, {"model": "m", "prompt": ["a", "b"]}, "/v1/completions", LOCAL),
        (BadRequest, CHAT | {"tools": [TOO_LONG]}, "/v1/chat/completions", LOCAL),
        (Unsupported, CHAT | {"functions": [{}]}, "/v1/chat/completions", LOCAL),
    ]

    async def work(context: Context) -> None:
        for error, body, path, caller in cases:
            with pytest.raises(error):
                admitted(context, body, path, caller)
        assert (await context.detached.bus.stream_info(subjects.JOB_STREAM)).messages == 0

    with_context(make, nats_server.url, work)


def test_a_job_is_known_before_it_is_published_and_repeated_it_is_one(nats_server: Any, make: Any) -> None:
    async def work(context: Context) -> None:
        detached, bus = context.detached, context.detached.bus
        request = admitted(context, CHAT).request
        record = await detached.submit(context, request, "a", ORDER)
        assert record.sequence > 0
        assert await job_records.read(bus, "a", RID) == record
        again = await asyncio.gather(*(detached.submit(context, request, "a", ORDER) for _ in range(3)))
        assert again == [record] * 3
        assert (await bus.stream_info(subjects.JOB_STREAM)).messages == 1
        state = await job_status.look(bus, "a", RID)
        assert state is not None
        await job_status.forget(bus, state)
        # one whose ingress died between the record and the publish: who repeats the request finishes what was begun
        late = msgspec.structs.replace(request, rid=job_records.new_job_id(time.time()))
        unpublished = msgspec.structs.replace(record, id=late.rid, request=job_records.stripped(late), sequence=0)
        assert await job_records.create(bus, unpublished)
        finished = await detached.submit(context, late, "a", ORDER)
        assert finished.sequence > record.sequence
        assert finished.deadline == unpublished.deadline

    with_context(make, nats_server.url, work)


def test_a_tenant_has_so_many_jobs_at_most_and_one_that_is_refused_leaves_nothing(nats_server: Any, make: Any) -> None:
    async def work(context: Context) -> None:
        detached, bus = context.detached, context.detached.bus
        request = admitted(context, CHAT).request
        one, two = (msgspec.structs.replace(request, rid=job_records.new_job_id(1.0)) for _ in range(2))
        await detached.submit(context, one, "a", ORDER)
        await detached.submit(context, one, "b", ORDER)
        with pytest.raises(QueueFull, match="limit is 1"):
            await detached.submit(context, two, "a", ORDER)
        assert await job_records.ids(bus, "a") == [one.rid]

    with_context(make, nats_server.url, work, tenant_jobs_max=1)

    async def full(context: Context) -> None:
        detached, bus = context.detached, context.detached.bus
        request = admitted(context, CHAT).request
        one, two = (msgspec.structs.replace(request, rid=job_records.new_job_id(1.0)) for _ in range(2))
        await detached.submit(context, one, "c", ORDER)
        with pytest.raises(QueueFull):  # the stream's own bound
            await detached.submit(context, two, "c", ORDER)
        assert await job_records.ids(bus, "c") == [one.rid]

    with_context(make, nats_server.url, full, job_messages_per_subject_max=1)
