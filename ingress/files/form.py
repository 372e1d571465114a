"""A multipart form while it arrives: small fields are gathered, and the bytes of its one file are given out as they come."""

from collections.abc import AsyncIterator
from email.message import Message

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser

from shared.errors import BadRequest, TooLarge, Unsupported

FIELD_BYTES_MAX = 1024
PARTS_MAX = 16  # the file and what is said of it, with room for what was sent twice
FILENAME_CHARACTERS_MAX = 255
FILE, PURPOSE = "file", "purpose"
KNOWN = {FILE, PURPOSE}


class Form:
    """Feed it with `read`. Afterwards `fields` has what was given beside the file."""

    def __init__(self, content_type: str, file_bytes_max: int) -> None:
        """Raises BadRequest for another content type."""
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.file_bytes = 0
        self.has_file = False
        self._file_bytes_max = file_bytes_max
        self._name = ""  # of the part that arrives now
        self._disposition = self._header = b""
        self._data: list[bytes] = []  # of the file, not given out yet
        self._field: list[bytes] = []
        self._parts = 0
        self._ended = False
        said = _parameters(content_type)
        boundary = said.get_param("boundary")
        if said.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise BadRequest("the body: multipart/form-data with a boundary is expected")
        try:
            self._parser = MultipartParser(
                boundary.encode("latin-1", "replace"),
                {
                    "on_part_begin": self._on_part,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except MultipartParseError as error:
            raise BadRequest(f"the boundary of the form: {error}") from None
        self._value = b""

    async def read(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The file's bytes, as they come. Raises BadRequest, TooLarge, Unsupported, and what `chunks` raises."""
        async for chunk in chunks:
            try:
                self._parser.write(chunk)
            except MultipartParseError as error:
                raise BadRequest(f"the form cannot be read: {error}") from None
            if self._data:
                yield b"".join(self._data)
                self._data.clear()
        if not self._ended:
            raise BadRequest("the form ends in the middle")

    # -- what the parser finds -----------------------------------------------------------------------------------------

    def _on_part(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"the form has more than {PARTS_MAX} parts")
        self._name, self._disposition = "", b""
        self._field = []

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        said = _parameters(self._disposition.decode("utf-8", "replace"))
        name, filename = said.get_param("name"), said.get_param("filename")
        self._name = name if isinstance(name, str) else ""
        if self._name == FILE:
            if self.has_file:
                raise BadRequest("file: one file a form", param=FILE)
            self.has_file = True
            self.filename = _plain_name(filename if isinstance(filename, str) else "")
        elif self._name not in KNOWN:
            raise Unsupported(f"{self._name or 'a part without a name'}: not supported here", param=self._name or None)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        piece = bytes(data[start:end])
        if self._name != FILE:
            self._field.append(piece)
            if sum(map(len, self._field)) > FIELD_BYTES_MAX:
                raise BadRequest(f"{self._name}: at most {FIELD_BYTES_MAX} bytes", param=self._name)
            return
        self.file_bytes += len(piece)
        if self.file_bytes > self._file_bytes_max:
            raise TooLarge(
                f"the file has at least {self.file_bytes} bytes, the limit is {self._file_bytes_max} bytes", param=FILE
            )
        self._data.append(piece)

    def _on_part_end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = b"".join(self._field).decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._ended = True


def _parameters(header: str) -> Message:
    """A header with parameters, such as a content type."""
    message = Message()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ")
    return message


def _plain_name(given: str) -> str:
    """A file's name without a path, and without what is no text."""
    name = given.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:FILENAME_CHARACTERS_MAX] or "file"
