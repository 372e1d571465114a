"""The services of an ingress on a real server, with an application that says what it was asked."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from ingress import answers
from ingress.answers import Receive, Scope, Send
from ingress.context import Context
from ingress.detached import Detached
from ingress.identity import SCOPE_KEY, Identities
from ingress.keys import Keys
from ingress.registrar import Registrar
from ingress.service import Services
from shared import services, subjects, wire
from shared.bus import Bus, Message
from shared.dispatch import Dispatcher
from shared.errors import BadRequest, ModelNotFound, NotFound, Unavailable
from shared.records import Route, Version, Weight
from shared.router import Router
from shared.settings import Settings


class Fixture:
    """A caller's bus, and what the application saw of it."""

    def __init__(self, bus: Bus, context: Context) -> None:
        self.bus, self.context = bus, context
        self.left = asyncio.Event()
        self.scopes: list[Scope] = []

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = (await receive())["body"]
        said = {"tenant": scope[SCOPE_KEY].tenant, "method": scope["method"], "path": scope["path"]}
        said |= {"query": scope["query_string"].decode(), "body": body.decode()}
        said["headers"] = {name.decode(): value.decode() for name, value in scope["headers"]}
        if b"stream" in body:
            await send(answers.start(200, answers.STREAM))
            await send(answers.body(b'data: {"token":"a","index":0}\n\n', more=True))
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        data = json.dumps(said).encode()
        await send(answers.start(200, answers.json_headers(data, [])))
        await send(answers.body(data))

    async def ask(self, subject: str, body: Any, **headers: str) -> Any:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await services.call(self.bus, subject, body, given)


@pytest.fixture
def serve(nats_server: Any) -> Callable[[Callable[[Fixture, Services], Awaitable[None]]], None]:
    def run(work: Callable[[Fixture, Services], Awaitable[None]]) -> None:
        async def main() -> None:
            settings = Settings(nats_url=nats_server.url)
            own, callers = await Bus.connect(settings, "ingress"), await Bus.connect(settings, "caller")
            try:
                await own.ensure()
                router, dispatcher = Router(), Dispatcher(own, settings)
                keys, registrar = Keys(own, settings), Registrar(own, settings)
                context = Context(
                    settings, router, dispatcher, keys, registrar, lambda: True, Identities(False), Detached(own)
                )
                fixture = Fixture(callers, context)
                found = Services(own, fixture.application, context)
                await found.start()
                await work(fixture, found)
                await found.close()
            finally:
                await own.close()
                await callers.close()

        asyncio.run(main())

    return run


def test_each_service_is_a_route_of_the_tenant_that_its_subject_names(serve: Any) -> None:
    async def work(fixture: Fixture, _: Services) -> None:
        rid = "a" * 32
        asked = [
            (subjects.service_infer("Qwen/Qwen3"), {"input": "x"}, "POST", "/v1/models/Qwen/Qwen3/infer", ""),
            (subjects.SERVICE_CANCEL, {"id": rid}, "DELETE", f"/v1/streams/{rid}", ""),
            (subjects.SERVICE_RESUME, {"id": rid}, "GET", f"/v1/streams/{rid}", ""),
            (subjects.service_jobs("submit"), {"endpoint": "/x"}, "POST", "/v1/jobs", ""),
            (subjects.service_jobs("list"), {"after": "a&b"}, "GET", "/v1/jobs", "after=a%26b"),
            (subjects.service_jobs("show"), {"id": rid, "wait": 2}, "GET", f"/v1/jobs/{rid}", "wait=2.0"),
            (subjects.service_jobs("events"), {"id": rid}, "GET", f"/v1/jobs/{rid}/events", ""),
            (subjects.service_jobs("cancel"), {"id": rid}, "POST", f"/v1/jobs/{rid}/cancel", ""),
            (subjects.service_jobs("delete"), {"id": rid}, "DELETE", f"/v1/jobs/{rid}", ""),
        ]
        for subject, body, method, path, query in asked:
            for root, tenant in (("", "local"), ("as.a=2Eb.", "a.b")):
                said = await fixture.ask(root + subject, body)
                assert (said["tenant"], said["method"], said["path"], said["query"]) == (tenant, method, path, query)
                assert not said["body"] or json.loads(said["body"]) == body
        assert await fixture.ask("as.acme." + subjects.SERVICE_WHOAMI, {}) == {"tenant": "acme"}

    serve(work)


def test_no_header_says_who_asks(serve: Any) -> None:
    async def work(fixture: Fixture, _: Services) -> None:
        said = await fixture.ask(
            subjects.service_infer("m"),
            {},
            Authorization="Bearer hr_x",
            X_Version_Pin="v1",
            Idempotency_Key="k",
            Host="h",
        )
        names = {"content-type", "content-length", "x-version-pin", "idempotency-key"}
        assert set(said["headers"]) == names

    serve(work)


def test_a_route_is_told_to_who_publishes_by_itself(serve: Any) -> None:
    async def work(fixture: Fixture, _: Services) -> None:
        router = fixture.context.router
        router.put_version(Version(model="m", version="v1", state="available", source="sim:zero", max_model_len=100))
        router.put_route(Route("m", {"stable": "v1"}, [Weight("v1", 10_000)]))
        for name, movable in (("m", True), ("m@stable", False), ("m@v1", False)):
            told = await fixture.ask("as.acme." + subjects.SERVICE_ROUTE, {"model": name})
            routed = services.Routed(tenant="acme", model="m", version="v1", movable=movable, max_model_len=100)
            assert told == msgspec.to_builtins(routed)
        with pytest.raises(ModelNotFound):
            await fixture.ask(subjects.SERVICE_ROUTE, {"model": "other"})

    serve(work)


def test_what_is_no_question_is_refused_by_code(serve: Any) -> None:
    async def work(fixture: Fixture, _: Services) -> None:
        for subject, body in (
            (subjects.SERVICE_CANCEL, {"id": "../models"}),
            (subjects.SERVICE_CANCEL, {}),
            (subjects.service_jobs("list"), {"limit": "x"}),
            (subjects.SERVICE_ROUTE, []),
        ):
            with pytest.raises(BadRequest):
                await fixture.ask(subject, body)
        for token in ("=", "=zz", "=FF", "=61", "=5A", "%", "x" * 129):  # none is what a name is written as
            for root in ("", "as.acme."):
                with pytest.raises(ModelNotFound, match="no model's name is written as"):
                    await fixture.ask(f"{root}headrace.infer.{token}", {"input": "x"})
        with pytest.raises(NotFound):
            await fixture.ask("headrace.=zz", {})
        assert fixture.scopes == []

    serve(work)


def test_a_caller_that_is_gone_is_noticed_and_only_its_own_address_is_answered(serve: Any) -> None:
    async def work(fixture: Fixture, _: Services) -> None:
        heard: list[Message] = []
        answered = asyncio.Event()

        def on_answer(message: Message) -> None:
            heard.append(message)
            answered.set()

        strangers = await fixture.bus.subscribe("tok.other.x", on_answer)
        subject = "as.acme." + subjects.service_infer("m")
        for reply in ("tok.other.x", "tok.acme.x.y", "tok.acme.*", "tok.ingress.x"):
            await fixture.bus.publish(subject, b"{}", headers={wire.HEADER_REPLY: reply})
        await fixture.bus.publish(subject, b"{}")
        own = subjects.frame_address("acme", "x")
        subscription = await fixture.bus.subscribe(own, on_answer)
        await fixture.bus.publish(subject, b"{}", headers={wire.HEADER_REPLY: own})
        async with asyncio.timeout(10):
            await answered.wait()
        assert [message.subject for message in heard] == [own]
        assert len(fixture.scopes) == 1
        await strangers.unsubscribe()
        await subscription.unsubscribe()
        await fixture.bus.publish(subject, b'"stream"', headers={wire.HEADER_REPLY: own})
        await asyncio.wait_for(fixture.left.wait(), 10)

    serve(work)


def test_it_takes_no_more_once_it_is_to_stop_and_is_discovered_until_then(serve: Any) -> None:
    async def work(fixture: Fixture, found: Services) -> None:
        stop = asyncio.Event()
        resting = asyncio.create_task(found.rest_after(stop))
        ping = json.loads((await fixture.bus.request("$SRV.PING.headrace")).data)
        info = json.loads((await fixture.bus.request(f"$SRV.INFO.headrace.{ping['id']}")).data)
        assert (ping["type"], info["type"]) == ("io.nats.micro.v1.ping_response", "io.nats.micro.v1.info_response")
        assert {each["subject"] for each in info["endpoints"]} >= {"headrace.infer.*", "headrace.jobs.*"}
        stop.set()
        await resting
        for subject in (subjects.SERVICE_WHOAMI, "as.acme." + subjects.SERVICE_WHOAMI, "$SRV.PING.headrace"):
            with pytest.raises(Unavailable):
                await fixture.bus.request(subject)

    serve(work)


def test_whatever_is_sent_is_answered_with_a_code_or_is_nobodys(serve: Any) -> None:
    async def work(fixture: Fixture, found: Services) -> None:
        dice = random.Random(5)
        bodies = [b"", b"[" * 100_000, b'{"id":' * 10_000, b"\xff\xfe", b'{"id": 1}', b'{"model": {}}']
        bodies += [dice.randbytes(dice.randint(1, 60)) for _ in range(40)]
        asked = [
            subjects.SERVICE_CANCEL,
            subjects.SERVICE_ROUTE,
            subjects.service_jobs("show"),
            "headrace.x",
            "headrace.infer",
            "headrace.infer.=",
            "as.acme.headrace.infer." + "x" * 999,
        ]
        for body in bodies:
            for subject in asked:
                answer = await fixture.bus.request(subject, body)
                assert services.error_in(msgspec.json.decode(answer.data)) is not None
            packed = {"Content-Type": "application/msgpack"}
            answer = await fixture.bus.request(subjects.service_infer("m"), body, headers=packed)
            assert answer.headers["Hr-End"] in ("complete", "error")
        await fixture.bus.publish("as.=.headrace.whoami", b"{}", "tok.local.x")
        assert (await fixture.ask(subjects.SERVICE_WHOAMI, {}))["tenant"] == "local"

    serve(work)
