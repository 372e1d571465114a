"""The whole public surface in seconds: run this first when something is wrong. `scripts/test tests/test_tiny.py`"""

import asyncio
import json
from typing import Any

import httpx
import pytest

from shared import errors, registry, subjects, wire
from shared.bus import Bus
from shared.records import EngineSettings, Route, Version, Weight
from workers.engine.load import load_engine
from workers.engine.request import EngineRequest, TokenEvent

SAMPLING = {"max_tokens": 5, "temperature": 0}
MODEL = "tiny/model"


def test_names_messages_and_errors_round_trip() -> None:
    assert subjects.request("Qwen/Qwen3-0.6B", "v1", "fast", "local") == "q.Qwen=2FQwen3-0=2E6B.v1.fast.local"
    assert subjects.names_of(subjects.key("a/b", "v.1")) == ["a/b", "v.1"]
    message = wire.FromWorker("w", [wire.No("rid", "sid")])
    assert wire.decode_from_worker(wire.encode(message)) == message
    assert errors.by_code("model_not_found", "x").status == 404


def test_the_engine_alone() -> None:
    async def run() -> list[TokenEvent]:
        engine = load_engine("sim:zero", None, EngineSettings(), 1)
        events: list[TokenEvent] = []
        finished = asyncio.Event()

        def on_events(batch: list[TokenEvent]) -> None:
            events.extend(batch)
            if any(event.finish for event in batch):
                finished.set()

        engine.start(asyncio.get_running_loop(), on_events)
        sampling = wire.Sampling(max_tokens=5, temperature=0.0)
        prompt = engine.prepare(wire.Input(prompt="hello there"), sampling)
        engine.submit(EngineRequest(key="k", tenant="t", prompt_ids=prompt, sampling=sampling))
        async with asyncio.timeout(10):
            await finished.wait()
        engine.stop()
        return events

    events = asyncio.run(run())
    assert sum(len(event.ids) for event in events) == 5
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 5


@pytest.mark.e2e
def test_every_door_of_a_running_stack(stack: Any) -> None:
    stack.push("sim:zero", MODEL)
    with httpx.Client(base_url=stack.http, timeout=30) as client:
        for path in ("/livez", "/readyz", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        assert MODEL in [model["id"] for model in client.get("/v1/models").json()["data"]]
        versions = client.get(f"/v1/models/{MODEL}/versions").json()
        assert [(each["version"], each["state"]) for each in versions] == [("v1", "available")]

        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **SAMPLING}
        plain = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
        text = plain["choices"][0]["message"]["content"]
        assert plain["usage"]["completion_tokens"] == len(text.split()) == 5
        streamed = events_of(client.post("/v1/chat/completions", json=chat | {"stream": True, "model": f"{MODEL}@v1"}))
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == text

        prompt = {"model": f"{MODEL}@stable", "prompt": "hello", **SAMPLING}
        plain = client.post("/v1/completions", json=prompt).raise_for_status().json()
        streamed = events_of(client.post("/v1/completions", json=prompt | {"stream": True}))
        assert "".join(event["choices"][0]["text"] for event in streamed) == plain["choices"][0]["text"]

        native = f"/v1/models/{MODEL}/infer"
        answer = client.post(native, json={"input": "hello", **SAMPLING}, headers={"X-Version-Pin": "v1"})
        assert answer.raise_for_status().headers["x-headrace-version"] == "v1"
        tokens = events_of(client.post(native, json={"input": "hello", "stream": True, **SAMPLING}))
        assert [event["index"] for event in tokens if "token" in event] == [0, 1, 2, 3, 4]
        assert tokens[-1]["finish_reason"] == "length"

        unknown = client.post("/v1/chat/completions", json=chat | {"model": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        wrong = client.post("/v1/chat/completions", json=chat | {"max_tokens": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")

    status = stack.status()
    assert [worker["state"] for worker in status["workers"] if worker["model"] == MODEL] == ["active"]


@pytest.mark.e2e
def test_the_records_behind_it(stack: Any) -> None:
    stack.push("sim:zero", MODEL)  # again: the same version is fine

    async def run() -> tuple[Version | None, Route | None]:
        bus = await Bus.connect(stack.settings(), "tiny")
        try:
            return await registry.find_version(bus, MODEL, "v1"), await registry.find_route(bus, MODEL)
        finally:
            await bus.close()

    version, route = asyncio.run(run())
    assert version is not None
    assert (version.state, version.source) == ("available", "sim:zero")
    assert route == Route(MODEL, {"stable": "v1"}, [Weight("v1", 10_000)])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a server-sent stream; OpenAI's end with [DONE]."""
    response.raise_for_status()
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
