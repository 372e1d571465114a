"""The lines of a batch's input: read from the object store a piece at a time, and what each asks for."""

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import Meta

from ingress.batches.pace import Pace
from ingress.files.store import FileRecord, Files
from shared import refusals

BOM = b"\xef\xbb\xbf"
CUSTOM_ID_CHARACTERS_MAX = 512
METHOD = "POST"
LINES_AT_ONCE = 1024


class Line(msgspec.Struct, frozen=True):
    """One request. `body` is that of the endpoint."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=CUSTOM_ID_CHARACTERS_MAX)]
    method: str
    url: str
    body: msgspec.Raw


class LineError(Exception):
    """A line that is no request: `code`, a message and the field to blame."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class RawLine(msgspec.Struct, gc=False):
    """A line as it is in the file, without its end. `number` counts all lines from 1, `end` is where the next one begins."""

    number: int
    data: bytes
    end: int


_decoder = msgspec.json.Decoder(Line)


def decode_line(data: bytes) -> Line:
    """Raises LineError."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        path, problem = refusals.read(str(error), Line)
        raise LineError("invalid_line", f"{path}: {problem}" if path else problem, path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is not JSON: {error}") from None


async def read_lines(files: Files, file: FileRecord, line_bytes_max: int, offset: int = 0) -> AsyncIterator[RawLine]:
    """The lines from `offset` on that are not blank. A line that is longer than it may be is cut, and the last one.

    Raises FileNotFound and ObjectsUnavailable.
    """
    number, begin, held, pace = 0, offset, b"", Pace()
    while True:
        piece = await files.read(file, begin + len(held))
        lines = (held + piece).split(b"\n")
        held = lines.pop()
        for data in lines:
            number += 1
            begin += len(data) + 1
            if number % LINES_AT_ONCE == 0:
                await pace.breathe()  # a file may have millions of blank ones
            if (data := _plain(data, number, offset)) and not data.isspace():
                yield RawLine(number, data, begin)
        too_long = len(held) > line_bytes_max
        if not piece or too_long:
            if (data := _plain(held, number + 1, offset)) and (too_long or not data.isspace()):
                yield RawLine(number + 1, data, begin + len(held))
            return


def _plain(data: bytes, number: int, offset: int) -> bytes:
    return data.removeprefix(BOM) if number == 1 and not offset else data
