"""What is sent to processes that must stand it: a fixed list, and seeded mutations of what is valid."""

import json
import os
import random
import socket
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlparse

SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "8"))
FACTOR = float(os.environ.get("HEADRACE_FUZZ_FACTOR", "1"))  # 100 for a long run

HUGE = 300_000  # bytes, of what is long
WHOLE: list[bytes] = [  # whatever is expected
    b"",
    b"\x00",
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"0",
    b"\xff\xfe\xfd",
    b"\xc1" * 20,  # a byte that msgpack never has
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\x91" * 100_000,  # msgpack: an array of an array of an array
    b"\x81\xa1a" * 50_000,
    b"\xdd\xff\xff\xff\xff",  # msgpack: an array of 4 G items
    b"\xdb\xff\xff\xff\xffx",  # a string of 4 GB
    b"\xdf\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"A" * HUGE,
    b"\xef\xbb\xbf{}",
    b"{}{}",
    b"{} x",
]
VALUES: list[Any] = [  # in the place of a field
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**64 - 1,
    -(2**63),
    1e308,
    -0.0,
    5e-324,
    "",
    "x" * 5000,
    "\x00",
    "\ud7ff\U0010ffff\u202e",
    "é" * 200,
    [],
    {},
    [[]],
    [None],
    {"": None},
    ["a"] * 3000,
    list(range(300)),
]
RAW_JSON: list[str] = [  # what json.dumps does not write
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5000,
    "-" + "9" * 100,
    "0." + "1" * 5000,
    '"\\ud800"',
    '"\\udc00\\ud800"',
    "01",
    "'x'",
    "[1,]",
    '{"a":1,"a":2}',
    "[" * 600 + "]" * 600,
]
MARK = "@@RAW@@"
NASTY = [
    b"\xff",
    b"\x00",
    b'"',
    b"\\ud800",
    b"9" * 40,
    b"-",
    b"[",
    b"{",
    b"\r\n",
    b"\xe2\x80\xae",
    b"\xc4\x00",
    b"\xdc\xff\xff",
]


def count(cases: int) -> int:
    """So many cases, or what a long run asks for."""
    return max(1, int(cases * FACTOR))


def mutations(valid: Sequence[bytes], cases: int, what: str) -> Iterator[bytes]:
    """Changed bytes: flips, cuts, splices of two, repetitions, insertions; one to four of them each."""
    rng = random.Random(f"{SEED} {what}")
    for _ in range(count(cases)):
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            data = _mutated(rng, data, valid)
        yield bytes(data)


def _mutated(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> bytearray:
    if not data:
        return bytearray(rng.randbytes(rng.randint(1, 20)))
    at, to = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at : min(to, at + 8)]
        case 4:
            other = rng.choice(valid)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case 5:
            data[at:at] = data[at : min(to, at + 64)] * rng.randint(1, 3)
        case _:
            data[at:at] = rng.choice(NASTY)
    return data


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a tree of dicts and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy of the tree with `by` at `path`."""
    if not path:
        return by
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


def misfits(valid: Sequence[Any], cases: int, what: str) -> Iterator[Any]:
    """Trees that are valid but for one or two values."""
    rng = random.Random(f"{SEED} {what}")
    for _ in range(count(cases)):
        tree = rng.choice(valid)
        for _ in range(rng.randint(1, 2)):
            tree = replaced(tree, rng.choice(list(places(tree))), rng.choice(VALUES))
        yield tree


def raw_json(valid: Sequence[Any]) -> Iterator[bytes]:
    """Each valid tree with each thing that is no JSON, or hardly, in the place of each value."""
    for tree in valid:
        for path in places(tree):
            text = json.dumps(replaced(tree, path, MARK))
            for raw in RAW_JSON:
                yield text.replace(f'"{MARK}"', raw).encode()


def words(rng: random.Random, least: int = 1, most: int = 40) -> str:
    """Any characters that a NATS token may have, and some that it may not in ours."""
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_=%$@{}é", k=rng.randint(least, most)))


class RawNats:
    """A connection to NATS that sends headers as they are, however bad."""

    def __init__(self, url: str) -> None:
        at = urlparse(url)
        self._socket = socket.create_connection((at.hostname, at.port), 10)
        self._file = self._socket.makefile("rb")
        assert self._file.readline().startswith(b"INFO")
        options = {
            "verbose": False,
            "headers": True,
            "no_responders": True,
            "name": "hostile",
            "lang": "-",
            "version": "0",
        }
        self._socket.sendall(b"CONNECT %b\r\n" % json.dumps(options).encode())
        self.flush()

    def publish(self, subject: str, data: bytes, headers: bytes | None = None, reply: str = "") -> None:
        """`headers`: all of the head, as it is."""
        to = f"{subject} {reply}".strip().encode()
        if headers is None:
            self._socket.sendall(b"PUB %b %d\r\n%b\r\n" % (to, len(data), data))
        else:
            sizes = (len(headers), len(headers) + len(data))
            self._socket.sendall(b"HPUB %b %d %d\r\n%b%b\r\n" % (to, *sizes, headers, data))

    def flush(self) -> None:
        """Everything that was sent is with the server; fails if it refused something."""
        self._socket.sendall(b"PING\r\n")
        line = self._file.readline()
        assert line == b"PONG\r\n", line

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def head(headers: Mapping[str, str]) -> bytes:
    """A head as it should be."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()
