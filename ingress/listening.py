"""The listening socket: its address, and how several processes share a port without losing a connection.

With `reuse_port` each process has a socket of its own on the port, and the kernel spreads new connections over them. One that
closes its socket would reset what waits to be accepted there. So it first has the kernel give new connections to another one
(SO_ATTACH_REUSEPORT_CBPF), takes what was given to it, and closes then. What it told the kernel outlives it and would keep
every connection from the rest, from a new one too: so those that go on take it back again and again.
"""

import asyncio
import contextlib
import ctypes
import logging
import socket
import ssl
import struct
from collections.abc import Callable

from shared.settings import Settings, SettingsError

log = logging.getLogger(__name__)

ATTACH_BPF, DETACH_BPF = 51, 68  # SO_ATTACH_REUSEPORT_CBPF, SO_DETACH_REUSEPORT_BPF
BPF_RETURN = 0x06
PROBE_S, PROBES = 0.3, 30
SPREAD_EVERY_S = 5.0


def bind(settings: Settings) -> socket.socket:
    """A socket on the configured address that does not listen yet. Raises SettingsError when the address is taken."""
    host, port = settings.http_host, settings.http_port
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def spread(bound: socket.socket) -> None:
    """Have the kernel give new connections to all sockets on the port of `bound`, which listens."""
    with contextlib.suppress(OSError):  # it does so already
        bound.setsockopt(socket.SOL_SOCKET, DETACH_BPF, 0)


async def keep_spreading(bound: socket.socket, goes_on: Callable[[], bool]) -> None:
    """Until cancelled, `spread` every few seconds while this process `goes_on` (it listens and does not drain)."""
    waited = False  # for the first time as soon as it listens
    while True:
        if goes_on():
            spread(bound)
            waited = True
        await asyncio.sleep(SPREAD_EVERY_S if waited else PROBE_S / PROBES)


async def steer_away(bound: socket.socket, took: Callable[[int], bool], secured: bool = False) -> None:
    """Have the kernel give new connections on the port of `bound` to another socket, if there is one.

    `took(port)` says whether the connection from that port was given to this process. `secured`: there is one only after the
    handshake of TLS, in which the certificate plays no part here.
    """
    address = bound.getsockname()
    try:
        _steer(bound, 0)
        reader_writer = await asyncio.wait_for(
            asyncio.open_connection(*address[:2], ssl=_any_certificate() if secured else None), PROBE_S
        )
    except OSError as error:  # and TimeoutError: without it connections are spread as before
        log.warning("new connections cannot be steered to another process: %r", error)
        return
    writer = reader_writer[1]
    own_port = writer.get_extra_info("sockname")[1]
    for _ in range(PROBES):
        if took(own_port):  # so this process's socket is the first of the port: the other one is the second
            _steer(bound, 1)
            break
        await asyncio.sleep(PROBE_S / PROBES)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    await asyncio.sleep(PROBE_S / 10)  # what was given to this process before is taken


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _steer(bound: socket.socket, index: int) -> None:
    """New connections go to the socket of that index; where there is none, they are spread."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, index))
    described = struct.pack("HL", 1, ctypes.addressof(program))
    bound.setsockopt(socket.SOL_SOCKET, ATTACH_BPF, described)
