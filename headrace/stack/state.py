"""What a running stack leaves in its data directory: a lock that says it runs, and a file that says where its servers are.

The lock is the truth: the kernel frees it with the supervisor, however that ends. The state file may be stale after a
power cut; it is then only read for ports that a new stack can use again.
"""

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from headrace.stack.servers import ObjectPorts
from shared import settings as settings_module
from shared.settings import Settings

STATE_NAME = "stack.json"
LOCK_NAME = "stack.lock"
_LOCK_TRIES_S = 0.3  # a `status` may hold the lock for an instant


class StackError(Exception):
    """The local stack cannot do what was asked; the message is for the person at the terminal."""


class ProcessState(msgspec.Struct, frozen=True):
    pid: int
    restarts: int


class StackState(msgspec.Struct, kw_only=True):
    """Where the servers of a stack are, with the keys to them: the file is readable by its owner only."""

    pid: int  # of the supervisor
    started: float  # unix seconds
    http: str  # URL
    nats: str  # URL
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    nats_port: int = 0  # 0: not a server of this stack
    object_ports: ObjectPorts | None = None  # None: not a server of this stack
    redis_port: int = 0  # 0: not a server of this stack
    processes: dict[str, ProcessState] = {}
    ready: bool = False


def read(data: Path) -> StackState | None:
    """The state that a stack wrote last; None when there is none that can be read."""
    try:
        return msgspec.json.decode((data / STATE_NAME).read_bytes(), type=StackState)
    except (OSError, msgspec.MsgspecError):
        return None


def write(data: Path, state: StackState) -> None:
    """Replace the state file, by a rename and with mode 0600 from its first byte on."""
    temporary = data / f".{STATE_NAME}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2))
    temporary.rename(data / STATE_NAME)


def make_directory(data: Path) -> None:
    """Make a data directory, for its owner only: the stores under it hold prompts and answers."""
    data.parent.mkdir(parents=True, exist_ok=True)
    data.mkdir(mode=0o700, exist_ok=True)


def acquire(data: Path) -> BinaryIO:
    """Take the lock of a data directory; keep the file open. Raises StackError when another stack runs on it."""
    make_directory(data)
    file = open(data / LOCK_NAME, "a+b")  # noqa: SIM115  # open as long as the stack runs
    deadline = time.monotonic() + _LOCK_TRIES_S
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.close()
            pid = holder(data)
            raise StackError(
                f"a stack is already running on {data} (pid {pid}): use it, `headrace down` it, or choose another --data"
            )
        time.sleep(0.02)
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def still_held(lock: BinaryIO, data: Path) -> bool:
    """Whether the lock that `acquire` gave is still the one in the directory: not when that was removed."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (data / LOCK_NAME).stat())
    except OSError:
        return False


def holder(data: Path) -> int | None:
    """The pid of the supervisor that runs on this directory; None when none does."""
    try:
        with open(data / LOCK_NAME, "rb") as file:
            if _try_lock(file, fcntl.LOCK_SH):
                return None
            return int(file.read() or 0)
    except FileNotFoundError:
        return None


def running(data: Path) -> StackState | None:
    """The state of the stack that runs on this directory now; None when none does."""
    return read(data) if holder(data) is not None else None


def client_settings(environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
    """Settings for a command that talks to a stack: those of the running one, under what was set by hand."""
    settings = settings_module.load(environ, **overrides)
    state = running(settings.data_path)
    if state is None:
        return settings
    by_hand = settings_module.given(environ, **overrides)
    found: dict[str, str] = {}
    if "nats_url" not in by_hand:
        found["nats_url"] = state.nats
    if "s3_endpoint" not in by_hand:
        found |= {
            "s3_endpoint": state.s3_endpoint,
            "s3_access_key": state.s3_access_key,
            "s3_secret_key": state.s3_secret_key,
        }
    return replace(settings, **found)


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
