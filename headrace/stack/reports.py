"""How a process of the stack tells its starter how far it is: JSON lines over an inherited pipe."""

import os
from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, tag="progress"):
    line: str


class Ready(msgspec.Struct, tag="ready"):
    http: str


class Failed(msgspec.Struct, tag="failed"):
    message: str


Report = Progress | Ready | Failed

_decoder = msgspec.json.Decoder(Report)


def decode(line: bytes) -> Report:
    report: Report = _decoder.decode(line)
    return report


def sender(fd: int) -> Callable[[Report], None]:
    """Send reports to the pipe `fd`; once its reader is gone they go nowhere."""
    os.set_inheritable(fd, False)

    def send(report: Report) -> None:
        try:
            os.write(fd, msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            return

    return send
