"""The multipart form, in whatever pieces it arrives."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingress.files.form import FIELD_BYTES_MAX, PARTS_MAX, Form
from shared.errors import BadRequest, TooLarge, Unsupported

TYPE = 'multipart/form-data; boundary="xyz"'
BYTES_MAX = 1000


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + data + b"\r\n"


def form_of(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


def read(body: bytes, sizes: list[int] | None = None, content_type: str = TYPE) -> tuple[Form, bytes]:
    form = Form(content_type, BYTES_MAX)

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        for size in [*(sizes or []), len(body)]:
            yield body[at : at + size]
            at += size

    async def whole() -> bytes:
        return b"".join([piece async for piece in form.read(pieces())])

    return form, asyncio.run(whole())


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 60), max_size=20), st.booleans())
def test_pieces_do_not_matter(data: bytes, sizes: list[int], file_first: bool) -> None:
    parts = [part("purpose", b"batch"), part("file", data, "in.jsonl")]
    form, found = read(form_of(*(parts[::-1] if file_first else parts)), sizes)
    assert (found, form.fields, form.filename, form.file_bytes) == (data, {"purpose": "batch"}, "in.jsonl", len(data))


@pytest.mark.parametrize(
    ("given", "kept"),
    [("../../etc/passwd", "passwd"), ("C:\\\\x\\\\y.jsonl", "y.jsonl"), ("", "file"), ("a\x00b", "ab"), ("ä b", "ä b")],
)
def test_a_name_has_no_path(given: str, kept: str) -> None:
    assert read(form_of(part("file", b"1", given)))[0].filename == kept


@pytest.mark.parametrize(
    ("body", "refusal", "param"),
    [
        (form_of(part("file", b"x" * (BYTES_MAX + 1), "f")), TooLarge, "file"),
        (form_of(part("file", b"1", "f"), part("file", b"2", "g")), BadRequest, "file"),
        (form_of(part("purpose", b"x" * (FIELD_BYTES_MAX + 1))), BadRequest, "purpose"),
        (form_of(part("expires_after[seconds]", b"3600")), Unsupported, "expires_after[seconds]"),
        (form_of(b"--xyz\r\nContent-Type: text/plain\r\n\r\nhi\r\n"), Unsupported, None),
        (part("file", b"1", "f"), BadRequest, None),
        (form_of(*[part("purpose", b"batch")] * (PARTS_MAX + 1)), BadRequest, None),
        (b"no form at all", BadRequest, None),
        (b"", BadRequest, None),
        (b"--xyz\r\n" + b"a: b\r\n" * 20 + b"\r\n", BadRequest, None),
    ],
)
def test_what_is_refused(body: bytes, refusal: Any, param: str | None) -> None:
    with pytest.raises(refusal) as caught:
        read(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="]
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        read(b"", content_type=content_type)
