"""What anybody might send over HTTP to the inference routes: an answer, or a code that says what is wrong. Never a 5xx."""

import asyncio
import json
import random
from collections.abc import Coroutine, Iterable
from typing import Any

from shared import errors
from shared.wire import new_id

from ..ingress.test_error_docs import tree
from ..reliability.conftest import DEADLINE_S
from .conftest import MODEL, Target
from .corpus import SEED, WHOLE, count, misfits, mutations, raw_json, words

AT_ONCE = 16
CODES = {error.code for error in tree(errors.HeadraceError)}
SMALL = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 5, "stop": ["zzz"], "logit_bias": {"5": 1.0}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": True},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOLD: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
]
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}, "strict": True}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1", "is_error": False}]},
]
ROUTES: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        [
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **SMALL},
            {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 2},
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "guided_json": {"type": "object"}},
            {"model": MODEL, "messages": TOLD, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3},
            {
                "model": MODEL,
                "messages": TOLD,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
            },
        ],
    ),
    (
        "/v1/completions",
        [
            {"model": MODEL, "prompt": "hi", **SMALL, "user": "me", "prompt_cache_key": "k"},
            {"model": MODEL, "prompt": ["hi", [1, 2]], "max_tokens": 2, "echo": True, "logprobs": 1},
            {"model": MODEL, "prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}, **SMALL},
        ],
    ),
    (
        f"/v1/models/{MODEL}/infer",
        [{"input": "hi", **SMALL}, {"input": [1, 2], "logprobs": 2}, {"input": [{"role": "user", "content": "x"}]}],
    ),
    (
        "/v1/messages",
        [
            {"model": MODEL, "messages": TURNS, "tools": [MESSAGES_TOOL], "max_tokens": 3, "system": "x"},
            {"model": MODEL, "messages": TURNS, "stream": True, "stop_sequences": ["a"], **SMALL},
            {
                "model": MODEL,
                "messages": TURNS,
                "max_tokens": 3,
                "tools": [MESSAGES_TOOL],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
        ],
    ),
]


def bodies() -> list[tuple[str, bytes]]:
    found = []
    for path, valid in ROUTES:
        packed = [json.dumps(each).encode() for each in valid]
        found += [(path, each) for each in [*WHOLE, *mutations(packed, 250, path), *raw_json(valid[:1])]]
        found += [(path, json.dumps(each).encode()) for each in misfits(valid, 250, f"misfits of {path}")]
    return found


def heads() -> list[bytes]:
    """Lines of a head beside those that say where to and how long."""
    rng = random.Random(f"{SEED} http heads")
    names = [b"idempotency-key", b"x-resumable", b"x-version-pin", b"x-session-id", b"x-request-id", b"content-type"]
    values = [b"", b" ", b'"', b'""', b"true", b"1", b"\xff", "é".encode(), b"x" * 300, b"x" * 5000, b"x" * 70_000]
    values += [b"v", b"stable", b"a@b", b"=FF", b"\x0b", b"\x00", b"-1", b"\xed\xa0\x80", b"a\r\n b", b"a\r\nx: y"]
    found = [b"%b: %b\r\n" % (name, value) for name in names for value in values]
    found += [
        b"x\r\n",
        b": x\r\n",
        b"\xff: x\r\n",
        b"x y: z\r\n",
        b"content-length: -1\r\n",
        b"content-length: 1e3\r\n",
    ]
    found += [
        b"content-length: 99999999999999999999\r\n",
        b"transfer-encoding: chunked\r\n",
        b"expect: 100-continue\r\n",
    ]
    found += [b"upgrade: websocket\r\nconnection: upgrade\r\n", b"x: y\r\n" * 3000, b"authorization: Bearer \xff\r\n"]
    found += [b"last-event-id: " + words(rng).encode() + b"\r\n" for _ in range(10)]
    return found + [b"%b: %b\r\n" % (rng.choice(names), words(rng).encode()) for _ in range(count(60))]


def check(sent: object, status: int, kind: str, text: str) -> None:
    """An answer, or one error in one shape with its own status."""
    assert status < 500, (sent, text)
    if status == 200:
        if kind.startswith("text/event-stream"):
            last = text.strip().split("\n\n")[-1]
            assert last.endswith("[DONE]") or '"finish_reason"' in last or '"error"' in last, (sent, text)
        return
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}, (sent, text)
    assert error["code"] in CODES, (sent, text)


async def at_once(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it, AT_ONCE at a time."""
    waiting = iter(work)

    async def some() -> None:
        for each in waiting:
            await each

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


async def post(target: Target, path: str, body: bytes, headers: dict[str, str]) -> None:
    answer = await target.http.post(target.first.url + path, content=body, headers=headers)
    check((path, body[:500], headers), answer.status_code, answer.headers.get("content-type", ""), answer.text)


async def post_raw(target: Target, path: str, body: bytes, lines: bytes) -> None:
    """With a head that no client would send. It may be answered before it was all sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % path.encode())
    length = b"" if b"content-length" in lines or b"chunked" in lines else b"content-length: %d\r\n" % len(body)
    writer.write(length + lines + b"\r\n" + (b"0\r\n\r\n" if b"chunked" in lines else body))
    try:
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionResetError:
        return  # it closed with some of the head unread
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    check((path, lines[:300]), int(head.split()[1]), "", rest.decode())


def test_no_body_is_answered_with_a_defect(target: Target) -> None:
    async def scenario() -> None:
        requests: list[tuple[str, bytes, dict[str, str]]] = [(path, body, {}) for path, body in bodies()]
        keyed = random.Random(f"{SEED} keyed").sample(requests, min(len(requests), 200))
        requests += [(path, body, {"idempotency-key": new_id()}) for path, body, _ in keyed]
        await at_once(post(target, *each) for each in requests)
        await target.answers()
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""


def test_no_header_is_answered_with_a_defect(target: Target) -> None:
    async def scenario() -> None:
        work = [
            post_raw(target, path, json.dumps(valid[0]).encode(), lines) for lines in heads() for path, valid in ROUTES
        ]
        await at_once(work)
        await target.answers()
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""
