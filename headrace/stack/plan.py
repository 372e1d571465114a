"""What a stack consists of: its settings, its ports and the command of each process. Decided once, before anything starts."""

import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from headrace.stack import ports, servers, state
from headrace.stack.process import Command
from headrace.stack.servers import ObjectPorts
from headrace.stack.state import StackError, StackState
from shared import settings as settings_module
from shared.lifeline import die_with_parent
from shared.settings import PREFIX, Settings

LOCAL_IDLE_SECONDS = 60.0
DEMO, CHECK = "demo", "check-nats"  # processes that end by themselves, each a command of that name
PORT_WAIT_S = 6.0  # for the processes of a killed stack to let go of the HTTP port


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`servers` are not ours and end with the supervisor by PR_SET_PDEATHSIG; `processes` are, by the lifeline."""

    settings: Settings  # of every process
    servers: list[Command]
    processes: list[Command]  # in the order in which they are ended
    demo: Command
    check: Command | None = None  # runs first, and fails with the reason when a NATS that is not ours cannot be used
    state: StackState


def make(data: Path, http_port: int | None, lifeline_fd: int, environ: Mapping[str, str] = os.environ) -> Plan:
    """Choose ports and keys, and write down every command. Raises StackError when the HTTP port cannot be had."""
    overrides: dict[str, object] = {"data_dir": str(data), "http_port": http_port, "lifeline_fd": lifeline_fd}
    by_hand = settings_module.given(environ, **overrides)
    settings = settings_module.load(environ, **overrides)
    before = state.read(data)
    if settings.http_port == 0:
        settings = replace(settings, http_port=ports.free_ports(1)[0])
    elif not _comes_free(settings.http_port, settings.http_host, PORT_WAIT_S if before and before.processes else 0.0):
        raise StackError(f"port {settings.http_port} is in use: choose another with --port (0: any free one)")
    if "idle_seconds" not in by_hand:
        settings = replace(settings, idle_seconds=LOCAL_IDLE_SECONDS)
    if "drain_linger_s" not in by_hand:
        settings = replace(settings, drain_linger_s=0.0)  # nobody else takes its connections

    commands: list[Command] = []
    nats_port, object_ports, redis_port = 0, None, 0
    taken: set[int] = set()
    if "nats_url" not in by_hand:
        monitor_port, fresh_port = ports.free_ports(2)
        nats_port = before.nats_port if before and _free(before.nats_port) else fresh_port
        taken = {nats_port, monitor_port}
        server = servers.nats(data / "nats", nats_port, monitor_port)
        settings = replace(settings, nats_url=server.url)
        command = _server_command(server, environ, servers.nats_ready, [])
        commands.append(replace(command, sound=lambda: servers.nats_sound(monitor_port)))
    if "s3_endpoint" not in by_hand:
        object_ports = _object_ports(before, taken)
        settings = replace(settings, s3_access_key=secrets.token_hex(10), s3_secret_key=secrets.token_hex(20))
        server = servers.objects(data / "objects", object_ports, settings.s3_access_key, settings.s3_secret_key)
        settings = replace(settings, s3_endpoint=server.url)
        stale = servers.object_sockets(before.object_ports) if before and before.object_ports else []
        leftovers = [*servers.object_sockets(object_ports), *stale]
        commands.append(_server_command(server, environ, servers.s3_ready, leftovers))

    if "redis_url" not in by_hand:
        inner = msgspec.structs.astuple(object_ports) if object_ports is not None else ()
        redis_port = _redis_port(before, {*taken, *inner, *(port + ports.GRPC_OFFSET for port in inner)})
        server = servers.redis(data / "redis", redis_port)
        settings = replace(settings, redis_url=server.url)
        commands.append(_server_command(server, environ, servers.redis_ready, []))

    http = f"http{'s' if settings.http_tls_cert else ''}://{settings.http_host}:{settings.http_port}"

    async def ingress_ready() -> bool:
        return await servers.http_status(f"{http}/readyz") == 200

    env = child_environment(settings, environ)
    return Plan(
        settings=settings,
        servers=commands,
        processes=[
            _own_command("ingress", env, lifeline_fd, ingress_ready),
            _own_command("controller", env, lifeline_fd),
        ],
        demo=_own_command(DEMO, env, lifeline_fd),
        check=_own_command(CHECK, env, lifeline_fd) if "nats_url" in by_hand else None,
        state=StackState(
            pid=os.getpid(),
            started=0.0,
            http=http,
            nats=settings.nats_url,
            s3_endpoint=settings.s3_endpoint,
            s3_access_key=settings.s3_access_key,
            s3_secret_key=settings.s3_secret_key,
            nats_port=nats_port,
            object_ports=object_ports,
            redis_port=redis_port,
        ),
    )


def child_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of our processes. Every setting is spelled out, so that nothing in headrace.toml overrides it."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return kept | {
        PREFIX + name.upper(): str(value)
        for name in settings.__struct_fields__
        if (value := getattr(settings, name)) is not None
    }


def _comes_free(port: int, host: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not ports.is_free(port, host):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _free(port: int) -> bool:
    return port > 0 and ports.is_free(port)


def _object_ports(before: StackState | None, taken: set[int]) -> ObjectPorts:
    """The ports of the last time if they are free: SeaweedFS names a directory after its master's port."""
    if before is not None and before.object_ports is not None:
        old = msgspec.structs.astuple(before.object_ports)
        if not taken & set(old) and all(_free(port) and _free(port + ports.GRPC_OFFSET) for port in old):
            return before.object_ports
    return ObjectPorts(*[port for port in ports.free_ports(7) if port not in taken][:5])


def _redis_port(before: StackState | None, taken: set[int]) -> int:
    """The port of the last time if it is free: an ingress of a stack that was killed may still look for it there."""
    if before is not None and before.redis_port not in taken and _free(before.redis_port):
        return before.redis_port
    return next(port for port in ports.free_ports(len(taken) + 1) if port not in taken)


def _server_command(
    server: servers.Server, environ: Mapping[str, str], ready: Callable[[str], Awaitable[bool]], leftovers: list[Path]
) -> Command:
    return Command(
        name=server.name,
        argv=server.argv,
        env=servers.environment(server, environ),
        directory=server.directory,
        preexec=die_with_parent(),
        leftovers=leftovers,
        ready=lambda: ready(server.url),
    )


def _own_command(
    name: str, env: dict[str, str], lifeline_fd: int, ready: Callable[[], Awaitable[bool]] | None = None
) -> Command:
    argv = [sys.executable, "-m", "headrace", name]
    return Command(name=name, argv=argv, env=env, pass_fds=(lifeline_fd,), ready=ready)
