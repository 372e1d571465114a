"""The demo model through the whole stack: HTTP, queue, controller, worker, engine."""

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from .conftest import CHAT, COMPLETIONS, Answer, Stack, assert_same_but_for_ties, greedy, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.model]

COLD_START_S_MAX = 15.0
KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "2"))  # half of them for bfloat16; the simulated model takes twenty
TRICKY = [
    "Reply with exactly these emoji: 😀 🎉 👩‍👩‍👧‍👦 🇫🇷 ❤️‍🔥",
    "Translate to Chinese, Japanese and Korean: good morning, my friend",
    "Write the words café, naïve, Ångström and résumé with combining accents: e\u0301 n\u0303 a\u030a",
]
STEPS = {
    "type": "json_schema",
    "json_schema": {
        "name": "steps",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "steps": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 3, "maxItems": 3}
            },
            "required": ["steps"],
            "additionalProperties": False,
        },
    },
}
TOPICS = ["rivers", "mills", "turbines", "salt", "trains", "bees", "clouds", "maps"]


def test_from_zero_to_an_answer_and_back_to_zero(demo_stack: Stack, demo_model: Path) -> None:
    demo_stack.push(demo_model, "sleepy", "--idle-seconds", "4")
    for start in range(2):
        assert not demo_stack.workers("sleepy")
        answer = demo_stack.stream(CHAT, greedy("sleepy", "What is the capital of France?", 8))
        assert answer.done
        assert "Paris" in answer.text
        assert answer.first_s is not None
        assert answer.first_s <= COLD_START_S_MAX
        worker = demo_stack.worker("sleepy")
        metrics = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics").text
        log = (demo_stack.data / "logs" / f"worker-{worker['id']}.log").read_text()
        for phase in ("process", "imports", "fetch", "load", "first_token"):
            assert re.search(rf'headrace_cold_start_seconds{{.*phase="{phase}".*}} \d', metrics)
            assert re.search(rf"\b{phase}=\d", log)
        if start == 0:
            wait_for(lambda: not demo_stack.workers("sleepy"), 15, "the end of an idle worker")
    assert "sleepy" in [each["id"] for each in httpx.get(demo_stack.url + "/v1/models").json()["data"]]
    demo_stack.idle()


def test_the_openai_sdk_streams_and_answers_plainly(demo_stack: Stack) -> None:
    with openai.OpenAI(base_url=demo_stack.url + "/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        plain = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=10, temperature=0)
        assert "Paris" in (plain.choices[0].message.content or "")
        assert plain.usage is not None
        chunks = list(
            client.chat.completions.create(
                model="smollm2@stable",
                messages=messages,
                max_tokens=10,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == plain.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            plain.usage.prompt_tokens,
            plain.usage.completion_tokens,
        )
        completion = client.completions.create(
            model="smollm2@v1", prompt="One, two, three,", max_tokens=5, temperature=0
        )
        assert "four" in completion.choices[0].text
        assert "smollm2" in [model.id for model in client.models.list()]
    demo_stack.idle()


def test_streamed_text_equals_plain_text(demo_stack: Stack) -> None:
    bodies = [greedy("smollm2", prompt, 48) for prompt in TRICKY]
    bodies += [
        {"model": "smollm2", "prompt": f"{text} {text} {text}", "max_tokens": 40, "temperature": 1.2, "seed": 11}
        for text in ("😀🎉👩‍👩‍👧‍👦", "早上好，我的朋友。", "e\u0301n\u0303a\u030a", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢")
    ]
    for body in bodies:
        path = CHAT if "messages" in body else COMPLETIONS
        plain = demo_stack.post(path, body).json()["choices"][0]
        streamed = demo_stack.stream(path, body)
        assert streamed.done
        assert streamed.text == (plain["text"] if "text" in plain else plain["message"]["content"])
        assert streamed.finish == plain["finish_reason"]
        if streamed.scored:
            tokens = streamed.scored[:-1] if streamed.finish == "stop" else streamed.scored
            raw = b"".join(bytes(token["bytes"]) for token in tokens)
            assert streamed.text == raw.decode(errors="replace")
    demo_stack.idle()


def test_stop_strings_split_across_tokens_cut_the_same_in_streams(demo_stack: Stack) -> None:
    body = {"model": "smollm2", "prompt": "One, two, three, four, five,", "max_tokens": 30, "temperature": 0}
    whole = demo_stack.stream(COMPLETIONS, body).text
    for begin, end in ((6, 11), (3, 17), (12, 14)):
        stop = whole[begin:end]
        cut = whole[: whole.index(stop)]
        plain = demo_stack.post(COMPLETIONS, body | {"stop": [stop, "never to be seen"]}).json()["choices"][0]
        streamed = demo_stack.stream(COMPLETIONS, body | {"stop": stop})
        assert (plain["text"], plain["finish_reason"]) == (cut, "stop")
        assert (streamed.text, streamed.finish, streamed.done) == (cut, "stop", True)
    demo_stack.idle()


def test_thirty_two_streams_at_once_equal_each_alone(demo_stack: Stack) -> None:
    bodies = [greedy("smollm2", f"Tell me fact number {n // 8 + 1} about {TOPICS[n % 8]}.", 20) for n in range(32)]
    together = asyncio.run(demo_stack.streams([(CHAT, body) for body in bodies]))
    for number, (body, answer) in enumerate(zip(bodies, together, strict=True)):
        assert answer.done
        alone = demo_stack.stream(CHAT, body)
        rid = answer.headers["x-request-id"]
        assert_same_but_for_ties(f"stream {number} ({rid})", answer, alone, 0.5)
    demo_stack.idle()


@pytest.mark.parametrize(("dtype", "kills"), [("float32", KILLS), ("bfloat16", KILLS // 2)])
def test_streams_survive_a_killed_worker(demo_stack: Stack, demo_model: Path, dtype: str, kills: int) -> None:
    name = f"killed-{dtype}"
    demo_stack.push(demo_model, name, "--set", f"dtype={dtype}", "--max-replicas", "1")
    question = "Describe how a water mill grinds grain."
    bodies = [greedy(name, question, 60, ignore_eos=True), greedy(name, question, 200, response_format=STEPS)]
    wanted_of = [demo_stack.stream(CHAT, body) for body in bodies[:kills]]
    for round_number in range(kills):
        body, wanted = bodies[round_number % 2], wanted_of[round_number % 2]
        worker = demo_stack.worker(name)
        at = 5 + 7 * round_number % (len(wanted.scored) - 10)
        killed: list[int] = []

        def kill_in_the_middle(
            answer: Answer, pid: int = worker["pid"], at: int = at, killed: list[int] = killed
        ) -> None:
            if len(answer.scored) >= at and not killed:
                killed.append(pid)
                demo_stack.kill(pid)

        answer = demo_stack.stream(CHAT, body, kill_in_the_middle)
        assert answer.done
        assert demo_stack.worker(name)["pid"] != worker["pid"]
        if body is bodies[0]:
            assert len(answer.scored) == 60
        else:
            assert answer.finish == "stop"
            assert len(msgspec.json.decode(answer.text)["steps"]) == 3
        if dtype == "float32":
            assert answer.text == wanted.text
        else:
            assert_same_but_for_ties(f"round {round_number}", answer, wanted, 0.5)
    demo_stack.idle()


def test_a_prompt_over_the_models_length_is_refused_with_both_numbers(demo_stack: Stack) -> None:
    answer = demo_stack.post(COMPLETIONS, {"model": "smollm2", "prompt": "word " * 9000, "max_tokens": 5})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    assert re.search(r"\b90\d\d\b", error["message"])
    demo_stack.idle()


def test_disconnecting_frees_the_slot_within_a_step(demo_stack: Stack) -> None:
    endless = greedy("smollm2", "Count to a thousand.", 8000, ignore_eos=True)

    async def leave_early() -> float:
        async with (
            httpx.AsyncClient(base_url=demo_stack.url, timeout=60) as client,
            client.stream("POST", CHAT, json=endless | {"stream": True}) as got,
        ):
            lines = got.aiter_lines()
            for _ in range(9):
                await anext(lines)
            await asyncio.to_thread(demo_stack.worker, "smollm2", running=1)
        return time.monotonic()

    left = asyncio.run(leave_early())
    demo_stack.idle()
    assert time.monotonic() - left < 6  # leases are some 0.3 s old at most; the rest is for a machine that is busy
