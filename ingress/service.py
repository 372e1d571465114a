"""What this ingress does for who asks over NATS: its HTTP routes as services, any ingress answering for all.

Admission, routing, limits and the requester's part are those of a request over HTTP: the same application serves it. Who asks
is said by the subject, which the caller's account writes (headrace/nats_accounts.py); without accounts it is the local tenant.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

from ingress.answers import Headers, Scope
from ingress.context import Context
from ingress.decoding import decode
from ingress.discovery import Discovery
from ingress.identity import SCOPE_KEY, tenant_itself
from ingress.service_call import TAKEN, ServiceCall, as_json
from shared import subjects, wire
from shared.background import Background
from shared.bus import NO_RESPONDERS, Bus, Message, Subscription
from shared.errors import HeadraceError, ModelNotFound, NotFound
from shared.services import Asked, Routed

log = logging.getLogger(__name__)

QUEUE = "ingresses"
_decode_asked = msgspec.json.Decoder(Asked)


class Meant(msgspec.Struct):
    """Which request or job is meant. `wait` is for the end of a job, in seconds."""

    id: wire.Rid
    wait: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Listed(msgspec.Struct):
    """Which jobs are to be listed."""

    limit: int | None = None
    after: str | None = None
    status: str | None = None


_decode_meant, _decode_listed = msgspec.json.Decoder(Meant), msgspec.json.Decoder(Listed)

# what a service does to the request or the job that its body names: method and path
MEANT = {
    ("cancel",): ("DELETE", "/v1/streams/{id}"),
    ("resume",): ("GET", "/v1/streams/{id}"),
    ("jobs", "show"): ("GET", "/v1/jobs/{id}"),
    ("jobs", "events"): ("GET", "/v1/jobs/{id}/events"),
    ("jobs", "cancel"): ("POST", "/v1/jobs/{id}/cancel"),
    ("jobs", "delete"): ("DELETE", "/v1/jobs/{id}"),
}
JOBS = "/v1/jobs"

Application = Callable[..., Awaitable[None]]


class Asks(msgspec.Struct):
    """A request to the application."""

    method: str
    path: str
    query: dict[str, Any] = {}
    body: bytes = b""


class Services:
    """The services of one process."""

    def __init__(self, bus: Bus, application: Application, context: Context) -> None:
        self._bus, self._application, self._context = bus, application, context
        self._inbox = f"{bus.inbox}_service"
        self._calls: dict[str, ServiceCall] = {}  # by the token that a lost reply comes back with
        self._numbers = 0
        self._tasks = Background()
        self._taking: list[Subscription] = []
        self._discovery = Discovery(bus, QUEUE)

    async def start(self) -> None:
        await self._bus.subscribe(self._inbox + ".*", self._on_status)
        for subject in (subjects.SERVICES, subjects.services_as(None)):
            self._taking.append(await self._bus.subscribe(subject, self._on_request, QUEUE))
        await self._discovery.start()

    async def rest_after(self, stop: asyncio.Event) -> None:
        """Once `stop` is set take no more requests, which go to other ingresses; those that are open go on."""
        await stop.wait()
        await self._discovery.stop()
        for subscription in self._taking:
            await subscription.unsubscribe()

    async def close(self) -> None:
        await self._tasks.close()

    def _on_status(self, message: Message) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        if call is not None and message.status == NO_RESPONDERS:
            call.gone()

    def _on_request(self, message: Message) -> None:
        """Raises Malformed for what cannot be answered."""
        try:
            tenant, tokens = subjects.asked_service(message.subject)
            own = subjects.frame_address(tenant, "")
        except ValueError as error:
            raise wire.Malformed(str(error)) from None
        reply = message.headers.get(wire.HEADER_REPLY, message.reply)
        if not reply or (reply != message.reply and not (reply.startswith(own) and re.match(wire.ADDRESS, reply))):
            raise wire.Malformed("no address of its own for the answer")
        self._tasks.do(self._serve(tenant, tokens, message, reply))

    async def _serve(self, tenant: str, tokens: list[str], message: Message, reply: str) -> None:
        self._numbers += 1
        token = str(self._numbers)

        async def publish(data: bytes, headers: Mapping[str, str]) -> bool:
            return await self._bus.publish(reply, data, f"{self._inbox}.{token}", headers)

        call = ServiceCall(publish)
        self._calls[token] = call
        try:
            await self._answer(call, tenant, tokens, message)
        except HeadraceError as error:
            await call.refuse(error)
        except Exception:  # the application has answered that it has a defect
            log.exception("a request on %s failed", message.subject)
        finally:
            del self._calls[token]

    async def _answer(self, call: ServiceCall, tenant: str, tokens: list[str], message: Message) -> None:
        if (found := MEANT.get(tuple(tokens))) is not None:
            meant = decode(_decode_meant, message.data)
            path = found[1].format(id=meant.id)
            await self._ask(call, tenant, Asks(found[0], path, {"wait": meant.wait} if meant.wait else {}), message)
            return
        match tokens:
            case ["infer", token]:
                model = _model(token)
                body = as_json(message.data, message.headers.get("Content-Type", ""))
                await self._ask(call, tenant, Asks("POST", f"/v1/models/{model}/infer", body=body), message)
            case ["jobs", "submit"]:
                await self._ask(call, tenant, Asks("POST", JOBS, body=message.data), message)
            case ["jobs", "list"]:
                listed = msgspec.structs.asdict(decode(_decode_listed, message.data))
                query = {name: value for name, value in listed.items() if value is not None}
                await self._ask(call, tenant, Asks("GET", JOBS, query), message)
            case ["whoami"]:
                await call.answer({"tenant": tenant})
            case ["route"]:
                await call.answer(self._route(tenant, decode(_decode_asked, message.data)))
            case _:
                raise NotFound(f"there is no service {'.'.join(['headrace', *tokens])}")

    def _route(self, tenant: str, asked: Asked) -> Routed:
        """Where a request goes that its caller publishes itself. Raises what the router refuses with."""
        resolved = self._context.router.resolve(asked.model, asked.pin, asked.session or wire.new_id())
        version = resolved.version
        return Routed(
            tenant=tenant,
            model=version.model,
            version=version.version,
            movable=resolved.by_weights,
            max_model_len=version.max_model_len,
            encoder=version.encoder,
        )

    async def _ask(self, call: ServiceCall, tenant: str, asks: Asks, message: Message) -> None:
        """Ask the application as its caller would over HTTP."""
        call.asks(asks.body)
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(asks.body))]
        for name, value in message.headers.items():
            if name.lower() in TAKEN:
                headers.append((name.lower().encode(), value.encode("utf-8", "replace")))
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": asks.method,
            "scheme": "nats",
            "path": asks.path,
            "raw_path": asks.path.encode(),
            "root_path": "",
            "query_string": urlencode(asks.query).encode(),
            "headers": headers,
            "client": None,
            "server": None,
            SCOPE_KEY: tenant_itself(tenant),
        }
        await self._application(scope, call.receive, call.send)


def _model(token: str) -> str:
    """The model that a subject names. Raises ModelNotFound for a token of no name: no model can have it."""
    try:
        return subjects.decode_token(token)
    except ValueError:
        raise ModelNotFound(f"no model's name is written as the token `{token[:80]}`", param="model") from None
