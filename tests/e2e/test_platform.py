"""The platform with simulated models: concurrency, faults, bad input, and the end of everything."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.stack import state
from shared import manifests
from shared.objects import ObjectStore

from .conftest import CHAT, COMPLETIONS, Answer, Stack, ended, wait_for

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
MILL: dict[str, Any] = {"input": "the river", "max_tokens": 40, "temperature": 0}


def completion(model: str, max_tokens: int, prompt: str = "hello there", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | more


@pytest.fixture(scope="module")
def sims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with simulated models that this module shares. Leave it idle."""
    stack = Stack(tmp_path_factory.mktemp("sim-stack"))
    stack.up("--no-demo")
    stack.push("sim:zero", "zero")
    stack.push("sim:fixed-20ms", "slow", "--max-replicas", "1")
    yield stack
    ended(stack)


def test_two_hundred_streams_are_contiguous(sims: Stack) -> None:
    bodies = [{"input": f"stream {number}", "max_tokens": 64} for number in range(200)]
    answers = asyncio.run(sims.streams([("/v1/models/zero/infer", body) for body in bodies]))
    for answer in answers:
        assert answer.done
        *tokens, last = answer.events
        assert [event["index"] for event in tokens] == list(range(64))
        assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 64)
    sims.idle()


def test_twenty_streams_each_survive_a_killed_worker(sims: Stack) -> None:
    """Four at a time, whose worker is killed at another token each time."""
    bodies = [("/v1/models/slow/infer", MILL | {"input": f"the river {number}"}) for number in range(4)]
    wanted = asyncio.run(sims.streams(bodies))
    for at in range(3, 23, 4):
        pid = sims.worker("slow")["pid"]
        begun: dict[int, Answer] = {}
        at_the_kill: list[int] = []

        def kill_in_the_middle(
            answer: Answer, pid: int = pid, at: int = at, begun: Any = begun, at_the_kill: list[int] = at_the_kill
        ) -> None:
            begun[id(answer)] = answer
            events = [len(each.events) for each in begun.values()]
            if not at_the_kill and len(events) == len(bodies) and min(events) >= at:
                at_the_kill.extend(events)
                sims.kill(pid)

        answers = asyncio.run(sims.streams(bodies, kill_in_the_middle))
        assert at <= max(at_the_kill) < MILL["max_tokens"]
        for answer, other in zip(answers, wanted, strict=True):
            assert answer.done
            assert answer.events[:-1] == other.events[:-1]
    sims.idle()


def test_a_disconnect_while_parked_or_running_leaves_nothing(sims: Stack) -> None:
    async def leave(after_events: int) -> None:
        body = completion("slow", 5000, stream=True)
        async with httpx.AsyncClient(base_url=sims.url, timeout=30) as client:
            if after_events == 0:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(COMPLETIONS, json=body | {"stream": False}, timeout=0.05)
                return
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.aiter_lines()
                for _ in range(after_events):
                    await anext(lines)

    for after_events in (0, 1, 20):
        asyncio.run(leave(after_events))
        sims.idle()


def test_a_slow_reader_delays_nobody(sims: Stack) -> None:
    host, port = sims.url.removeprefix("http://").split(":")
    body = msgspec.json.encode(completion("zero", 8000, stream=True))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        start = time.monotonic()
        answers = asyncio.run(sims.streams([(COMPLETIONS, completion("zero", 64, f"p {n}")) for n in range(20)]))
        assert all(answer.done for answer in answers)
        assert time.monotonic() - start < 10
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = slow.recv(65536)
            assert part, "the stream of the slow reader broke"
            received += part
        assert b"data: [DONE]" in received
    sims.idle()


def test_nats_restarted_while_streaming_is_a_pause(sims: Stack) -> None:
    pid = sims.status()["processes"]["nats"]["pid"]
    killed = False

    def kill_once(answer: Answer) -> None:
        nonlocal killed
        if not killed and len(answer.events) == 20:
            killed = True
            sims.kill(pid)

    bodies = [("/v1/models/slow/infer", {"input": f"n {number}", "max_tokens": 100}) for number in range(8)]
    answers = asyncio.run(sims.streams(bodies, kill_once))
    assert killed
    for answer in answers:
        assert answer.done, answer.error
        assert [event["index"] for event in answer.events[:-1]] == list(range(100))
    sims.idle()


def test_a_restarted_controller_keeps_the_workers(sims: Stack) -> None:
    sims.stream(COMPLETIONS, completion("zero", 1))
    before = sims.worker("zero")["pid"]
    pid = sims.status()["processes"]["controller"]["pid"]
    sims.kill(pid)
    wait_for(lambda: sims.status()["processes"]["controller"]["pid"] != pid, what="a new controller")
    assert sims.stream(COMPLETIONS, completion("zero", 5)).done
    assert sims.worker("zero")["pid"] == before
    sims.idle()


def test_a_version_that_cannot_start_fails_with_its_reason(sims: Stack, tmp_path: Path) -> None:
    source = tmp_path / "broken"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "no-such-model", "max_position_embeddings": 64}')
    (source / "model.safetensors").write_bytes(b"not safetensors")
    sims.push(source, "broken")
    answer = sims.post(COMPLETIONS, completion("broken", 4))
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "version_failed"
    [record] = [each for each in sims.status()["models"] if each["model"] == "broken"]
    assert record["state"] == "failed"
    assert "no-such-model" in record["reason"]
    assert record["reason"] in error["message"]
    sims.idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "named"),
    [
        (CHAT, b"{not json", 400, "invalid_request", "JSON"),
        (CHAT, b'{"model":"zero","messages":[{"role":"user","content":"\xff\xfe"}]}', 400, "invalid_request", ""),
        (CHAT, {"model": "zero", "messages": []}, 400, "invalid_request", "messages"),
        (
            CHAT,
            {"model": "zero", "messages": [{"role": 7, "content": "x"}]},
            400,
            "invalid_request",
            "messages[0].role",
        ),
        (CHAT, {"model": "zero", "messages": "x"}, 400, "invalid_request", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}, 400, "invalid_request", "model"),
        (COMPLETIONS, completion("nobody", 5), 404, "model_not_found", "nobody"),
        (COMPLETIONS, completion("zero@nobody", 5), 404, "version_not_found", "nobody"),
        (COMPLETIONS, completion("zero", -5), 400, "invalid_request", "max_tokens"),
        (COMPLETIONS, completion("zero", 10**9), 400, "context_length_exceeded", "8192"),
        (COMPLETIONS, completion("zero", 5, temperature=-1), 400, "invalid_request", "temperature"),
        (COMPLETIONS, completion("zero", 5, n=0), 400, "invalid_request", "n"),
        (COMPLETIONS, completion("zero", 5, stream_options={"include_usage": True}), 400, "invalid_request", "stream"),
        (COMPLETIONS, completion("zero", 5, prompt="x" * 10_000_000), 413, "request_too_large", ""),
        ("/v1/nothing", {}, 404, "not_found", ""),
    ],
)
def test_bad_input_is_a_clear_error_and_costs_nothing(
    sims: Stack, path: str, body: Any, status: int, code: str, named: str
) -> None:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    answer = httpx.post(sims.url + path, content=raw, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert named in error["message"] + str(error["param"])
    if status == 413:
        assert len(re.findall(r"\d{6,}", error["message"])) == 2


def test_bad_input_left_nothing_behind(sims: Stack) -> None:
    sims.idle()
    assert sims.stream(COMPLETIONS, completion("zero", 5)).done


def test_an_object_store_that_is_down_at_cold_start_is_waited_for(sims: Stack, tiny_model: Path) -> None:
    sims.push(str(tiny_model), "tiny")
    pid = sims.status()["processes"]["objects"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with socket.create_connection((sims.url[7:].split(":")[0], int(sims.url.rsplit(":", 1)[1]))) as parked:
            body = msgspec.json.encode(completion("tiny", 4, prompt="a"))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            parked.sendall(head.encode() + body)
            wait_for(lambda: sims.workers("tiny", "starting"), what="a worker that starts")
            os.kill(pid, signal.SIGCONT)
            parked.settimeout(60)
            assert b" 200 " in parked.recv(65536)
    finally:
        os.kill(pid, signal.SIGCONT)
    sims.idle()


def test_without_the_object_store_warm_versions_go_on_and_cold_ones_say_so(tmp_path: Path, tiny_model: Path) -> None:
    short = {"QUEUE_DEADLINE_S": "4", "FETCH_RETRY_S": "1", "START_BACKOFF_MAX_S": "1"}
    stack = Stack(tmp_path / "data", {f"HEADRACE_{name}": value for name, value in short.items()})
    stack.up("--no-demo")
    try:
        for name in ("warm", "cold"):
            stack.push(str(tiny_model), name)
        while stack.post(COMPLETIONS, completion("warm", 4, prompt="a")).status_code == 504:
            pass  # a slow start of the first worker
        pid = stack.status()["processes"]["objects"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            cold = stack.post(COMPLETIONS, completion("cold", 4, prompt="a"))
            assert (cold.status_code, cold.json()["error"]["code"]) == (504, "queue_deadline")
            for number in range(3):
                warm = stack.stream(COMPLETIONS, completion("warm", 8, prompt=f"a {number}"))
                assert warm.done
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: stack.post(COMPLETIONS, completion("cold", 4, prompt="a")).status_code == 200, 60, "a start")
        stack.idle()
    finally:
        ended(stack)


def test_a_corrupt_weight_file_is_never_served(sims: Stack, tiny_model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_model, tmp_path / "other")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # others than those that this host has fetched already
    sims.push(source, "corrupt")
    corrupt_object(sims, "corrupt")
    answer = sims.post(COMPLETIONS, completion("corrupt", 4, prompt="a"))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "version_failed"
    assert "sha256" in answer.json()["error"]["message"]
    sims.idle()


def corrupt_object(stack: Stack, model: str) -> None:
    """Replace the stored weights by as many other bytes."""
    store = ObjectStore(stack.settings())
    manifest = manifests.decode(store.get(manifests.manifest_key(model, "v1")))
    [weights] = [file for file in manifest.files if file.name.endswith(".safetensors")]
    store.put(manifests.blob_key(weights.sha256), bytes(weights.size))


def test_whatever_ends_the_stack_leaves_no_process_and_no_change_in_the_checkout(stopped_stack: Stack) -> None:
    def changes() -> str:
        return subprocess.run(["git", "status", "--porcelain"], cwd=REPOSITORY, capture_output=True, text=True).stdout

    before = changes()
    stopped_stack.up("--no-demo")
    stopped_stack.push("sim:fixed-20ms", "slow")
    assert stopped_stack.stream(COMPLETIONS, completion("slow", 5)).done
    assert len(stopped_stack.processes()) >= 7  # supervisor, three servers, ingress, controller, worker
    stopped_stack.kill(stopped_stack.state["pid"])
    wait_for(lambda: not stopped_stack.processes(), 10, "the end of every process")
    assert state.holder(stopped_stack.data) is None
    stopped_stack.up("--no-demo")  # a stale state directory
    assert stopped_stack.stream(COMPLETIONS, completion("slow", 5)).done
    stopped_stack.down()
    wait_for(lambda: not stopped_stack.processes(), 20, "the end of every process")
    assert changes() == before
