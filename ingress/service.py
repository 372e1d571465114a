"""What this ingress does for who asks over NATS: its HTTP routes as services, any ingress answering for all.

Admission, routing, limits and the requester's part are those of a request over HTTP: the same application serves it. Who asks
is said by the subject, which the caller's account writes (headrace/nats_accounts.py); without accounts it is the local tenant.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from ingress.answers import Headers, Scope
from ingress.context import Context
from ingress.decoding import decode
from ingress.identity import SCOPE_KEY, tenant_itself
from ingress.service_call import TAKEN, ServiceCall, as_json
from shared import subjects, wire
from shared.bus import NO_RESPONDERS, Bus, Message, Subscription
from shared.errors import HeadraceError, NotFound
from shared.services import Asked, Routed

log = logging.getLogger(__name__)

QUEUE = "ingresses"
_decode_asked = msgspec.json.Decoder(Asked)


class Meant(msgspec.Struct):
    """Which request is to be ended or gone on with."""

    id: wire.Rid


_decode_meant = msgspec.json.Decoder(Meant)

Application = Callable[..., Awaitable[None]]


class Services:
    """The services of one process."""

    def __init__(self, bus: Bus, application: Application, context: Context) -> None:
        self._bus, self._application, self._context = bus, application, context
        self._inbox = f"{bus.inbox}_service"
        self._calls: dict[str, ServiceCall] = {}  # by the token that a lost reply comes back with
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking: list[Subscription] = []

    async def start(self) -> None:
        await self._bus.subscribe(self._inbox + ".*", self._on_status)
        for subject in (subjects.SERVICES, subjects.services_as(None)):
            self._taking.append(await self._bus.subscribe(subject, self._on_request, QUEUE))

    async def rest_after(self, stop: asyncio.Event) -> None:
        """Once `stop` is set take no more requests, which go to other ingresses; those that are open go on."""
        await stop.wait()
        for subscription in self._taking:
            await subscription.unsubscribe()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_status(self, message: Message) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        if call is not None and message.status == NO_RESPONDERS:
            call.gone()

    def _on_request(self, message: Message) -> None:
        tenant, names = subjects.asked_service(message.subject)  # a ValueError is told by the bus
        reply = message.headers.get(wire.HEADER_REPLY, message.reply)
        if not reply or (reply != message.reply and not reply.startswith(subjects.frame_address(tenant, ""))):
            log.warning("a request on %s has no address of its own for the answer", message.subject)
            return
        task = asyncio.create_task(self._serve(tenant, names, message, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, tenant: str, names: list[str], message: Message, reply: str) -> None:
        self._numbers += 1
        token = str(self._numbers)

        async def publish(data: bytes, headers: Mapping[str, str]) -> bool:
            return await self._bus.publish(reply, data, f"{self._inbox}.{token}", headers)

        call = ServiceCall(publish)
        self._calls[token] = call
        try:
            await self._answer(call, tenant, names, message)
        except HeadraceError as error:
            await call.refuse(error)
        except Exception:  # the application has answered that it has a defect
            log.exception("a request on %s failed", message.subject)
        finally:
            del self._calls[token]

    async def _answer(self, call: ServiceCall, tenant: str, names: list[str], message: Message) -> None:
        match names:
            case ["infer", model]:
                body = as_json(message.data, message.headers.get("Content-Type", ""))
                await self._ask(call, tenant, "POST", f"/v1/models/{model}/infer", body, message)
            case ["cancel"]:
                rid = decode(_decode_meant, message.data).id
                await self._ask(call, tenant, "DELETE", f"/v1/streams/{rid}", b"", message)
            case ["resume"]:
                rid = decode(_decode_meant, message.data).id
                await self._ask(call, tenant, "GET", f"/v1/streams/{rid}", b"", message)
            case ["whoami"]:
                await call.answer({"tenant": tenant})
            case ["route"]:
                await call.answer(self._route(tenant, decode(_decode_asked, message.data)))
            case _:
                raise NotFound(f"there is no service {'.'.join(['headrace', *names])}")

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
        )

    async def _ask(self, call: ServiceCall, tenant: str, method: str, path: str, body: bytes, message: Message) -> None:
        call.asks(body)
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        for name, value in message.headers.items():
            if name.lower() in TAKEN:
                headers.append((name.lower().encode(), value.encode("utf-8", "replace")))
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "nats",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            SCOPE_KEY: tenant_itself(tenant),
        }
        await self._application(scope, call.receive, call.send)
