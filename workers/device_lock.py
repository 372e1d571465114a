"""One loaded worker for each device of a host, whoever started it: a lock on a file, which ends with the process."""

import fcntl
import os
from pathlib import Path

_held: list[int] = []


def hold_device(data: Path, device: str) -> None:
    """Wait until no other worker of this data directory has `device`, and keep it until the process ends. Blocking."""
    directory = data / "devices"
    directory.mkdir(parents=True, exist_ok=True)
    name = "".join(each if each.isalnum() or each in "-_" else "=" for each in device)
    lock = os.open(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
