"""The ingress process: connect, serve, drain."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI

from ingress.app import build_app
from ingress.batches.runner import BatchRunner
from ingress.connection import Connection
from ingress.context import Context
from ingress.cors import allow_pages
from ingress.detached import Detached
from ingress.families import BATCHED
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.listening import bind, keep_spreading, steer_away
from ingress.registrar import Registrar
from ingress.service import Services
from shared import lifeline, tls
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.errors import Draining
from shared.log import configure_logging
from shared.router import Router
from shared.settings import Settings, SettingsError
from shared.watches import Watches

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # idle connections; longer than the usual load balancer's minute
BACKLOG = 2048
HEADS_EVERY_S = 1.0
FILES_BESIDE = 256  # open files that are no connections of clients
LAST_WRITES_S = 1  # for what was interrupted to reach its clients


class Server(uvicorn.Server):
    """uvicorn under our own signals: it stops when told, after the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        """Take no more connections; the open ones go on."""
        for server in self.servers:
            server.close()

    async def watch_heads(self, every_s: float) -> None:
        """Until cancelled, end connections whose clients are too slow with their heads."""
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.check_head(now)

    def took(self, port: int) -> bool:
        """Whether there is a connection from `port` of a client."""
        clients = (getattr(connection, "client", None) for connection in self.server_state.connections)
        return any(client is not None and client[1] == port for client in clients)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(settings: Settings) -> None:
    """Raises SettingsError for an address that other hosts reach without keys, unless `insecure` allows it."""
    host = settings.http_host
    if not is_loopback(host) and not settings.require_keys and not settings.insecure:
        raise SettingsError(
            f"http_host is {host}, which other hosts can reach, and requests need no keys: "
            "set `require_keys` (HEADRACE_REQUIRE_KEYS=true), or `insecure` (HEADRACE_INSECURE=true) if that is meant"
        )


def allow_connections(settings: Settings) -> Settings:
    """Let this process open as many files as its connections need; settings with fewer connections where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.http_connections_max + FILES_BESIDE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return msgspec.structs.replace(settings, http_connections_max=max(1, wanted - FILES_BESIDE))


def make_server(context: Context, application: FastAPI) -> Server:
    """An HTTP server of `context` that is not started yet. Raises SettingsError for a certificate or origins of no use."""
    settings = context.settings
    if settings.http_tls_cert or settings.http_tls_key:
        tls.check_pair(settings.http_tls_cert, settings.http_tls_key, "http_tls")
        tls.load_pair(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings.http_tls_cert, settings.http_tls_key, "http_tls"
        )
    return Server(
        uvicorn.Config(
            allow_pages(application, settings),
            http=partial(Connection, settings),  # type: ignore[arg-type]  # it is called, and nothing else
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WRITES_S,
            backlog=BACKLOG,
            ssl_certfile=settings.http_tls_cert or None,
            ssl_keyfile=settings.http_tls_key or None,
        )
    )


async def serve_until(
    stop: asyncio.Event,
    context: Context,
    bound: socket.socket,
    application: FastAPI | None = None,
) -> None:
    """Serve `application` (None: that of the context alone).

    Once `stop` is set, drain within `drain_budget_s`, of which the last part is for what has to be told.
    """
    server, settings = make_server(context, application or build_app(context)), context.settings
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[bound]))
        heads_every_s = min(HEADS_EVERY_S, settings.request_read_s / 4)
        watching = [group.create_task(context.watch_clients()), group.create_task(server.watch_heads(heads_every_s))]
        if settings.reuse_port:
            watching.append(group.create_task(keep_spreading(bound, lambda: server.started and not context.draining)))
        await stop.wait()
        secured = bool(settings.http_tls_cert)
        reserve_s = min(LAST_WRITES_S, settings.drain_budget_s / 10)
        deadline = loop.time() + settings.drain_budget_s - reserve_s
        context.draining = True  # not ready; every answer closes its connection
        log.info("draining: %d requests are open", len(context.open))
        if settings.reuse_port:
            await steer_away(bound, server.took, secured)
        await asyncio.sleep(min(settings.drain_linger_s, settings.drain_budget_s / 4))
        if settings.reuse_port:
            await steer_away(bound, server.took)  # others may have taken it back meanwhile
        server.stop_listening()
        await drain(context, deadline)
        server.should_exit = True
        for task in watching:
            task.cancel()


async def drain(context: Context, deadline: float) -> None:
    """Wait for the open requests, and for those that still come on open connections; end what `deadline` is too early for."""
    loop = asyncio.get_running_loop()
    while context.open and (left := deadline - loop.time()) > 0:
        await asyncio.wait([exchange.task for exchange in context.open], timeout=left)
    context.accepting = False
    if context.open:
        log.warning("the drain budget is spent: %d requests are ended", len(context.open))
        context.interrupt_all(Draining("this ingress is shutting down and its drain budget is spent"))


async def run(settings: Settings, bound: socket.socket) -> None:
    """Serve on `bound` until SIGTERM or SIGINT; a second one ends the process at once."""
    bus = await Bus.connect(settings, "ingress")
    try:
        await bus.ensure()
        dispatcher = Dispatcher(bus, settings)
        await dispatcher.start()
        router = Router()
        watches = Watches(router, dispatcher)
        await watches.start(bus)
        identities = Identities(settings.require_keys)
        await identities.start(bus)
        keys = Keys(bus, settings)
        registrar = Registrar(bus, settings)

        def usable() -> bool:
            return bus.connected and watches.live and identities.live

        context = Context(settings, router, dispatcher, keys, registrar, usable, identities, Detached(bus))
        lease = context.observations.keeper(bus)
        await lease.start()
        await context.peers.start(bus)
        context.limits.start()
        batches = BatchRunner(context, bus, context.files, BATCHED)
        await batches.start()
        stop = _stop_on_signals()
        application = build_app(context)
        services = Services(bus, application, context)
        await services.start()
        resting = asyncio.create_task(services.rest_after(stop))
        gc.collect()
        gc.freeze()  # what is loaded by now stays: full collections need not walk it
        await serve_until(stop, context, bound, application)
        await resting
        await services.close()
        await batches.close()
        await lease.stop()
        await watches.close()
        await identities.close()
        await dispatcher.close()
        await context.limits.close()
        await context.peers.close()
        await context.responses.close()
        await keys.close()
        context.files.close()
    finally:
        await bus.close()


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second one has its usual effect."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def main(settings: Settings) -> None:
    """The process, until its end.

    Raises SettingsError for an address that cannot be used and Unavailable when NATS cannot be reached.
    """
    configure_logging(settings)
    check_address(settings)
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    if settings.require_keys and not settings.http_tls_cert and not is_loopback(settings.http_host):
        log.warning("keys come to %s without TLS: let something in front of it speak TLS", settings.http_host)
    settings = allow_connections(settings)
    with bind(settings) as bound, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings, bound))
