"""Files and batches as callers have them: OpenAI's SDK, and `headrace batch`, on a stack of real processes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types import responses as sdk_responses

from ..conftest import LocalStack

pytestmark = pytest.mark.e2e

ENDED = ("completed", "failed", "expired", "cancelled")
MODEL, SLOW, EMBEDDER = "batched", "batched-slow", "batched-vectors"
CHAT: Any = "/v1/chat/completions"
EMBEDDINGS: Any = "/v1/embeddings"
RESPONSES: Any = "/v1/responses"


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> LocalStack:
    stack.push("sim:zero", MODEL)
    stack.push("sim:fixed-20ms", SLOW)
    return stack


@pytest.fixture(scope="module")
def sdk(served: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.http + "/v1", api_key="none", max_retries=0) as client:
        yield client


def line(name: str, model: str = MODEL, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "messages": [{"role": "user", "content": name}], "max_tokens": 6, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": asked}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


def started(sdk: openai.OpenAI, lines: list[dict[str, Any]], window: Any = "24h") -> Batch:
    file = sdk.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window, metadata={"for": "test"})


def ended(sdk: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + 60
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = sdk.batches.retrieve(batch.id)
    return batch


def lines_of(sdk: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in sdk.files.content(file_id).text.splitlines()]


def test_the_sdk_runs_a_batch_and_answers_are_those_of_its_route(sdk: openai.OpenAI) -> None:
    lines = [line(f"r{number}", n=1 + number % 2, logprobs=number % 3 == 0) for number in range(20)]
    lines[4]["body"] |= {"temperature": 9}
    batch = ended(sdk, started(sdk, lines))
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 20, 19, 1)
    assert (batch.object, batch.metadata, batch.errors) == ("batch", {"for": "test"}, None)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    answers = {each["custom_id"]: each for each in lines_of(sdk, batch.output_file_id)}
    assert list(answers) == [each["custom_id"] for each in lines if each["custom_id"] != "r4"]
    for asked in (lines[0], lines[1], lines[3]):
        same = json.loads(sdk.chat.completions.with_raw_response.create(**asked["body"]).text)
        told = answers[asked["custom_id"]]["response"]
        assert told["status_code"] == 200
        for body in (same, told["body"]):
            assert body.pop("id").startswith("chatcmpl-")
            assert isinstance(body.pop("created"), int)
            body["usage"].pop("prompt_tokens_details")
        assert told["body"] == same
    [error] = lines_of(sdk, batch.error_file_id)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(**lines[4]["body"])
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"] == refused.value.body
    purposes = {each.purpose for each in sdk.files.list() if each.id in (batch.output_file_id, batch.error_file_id)}
    assert purposes == {"batch_output"}
    assert batch.id in [each.id for each in sdk.batches.list(limit=2)], "pages follow each other"
    assert sdk.files.delete(batch.input_file_id).deleted


def test_texts_are_embedded_as_their_route_does(served: LocalStack, sdk: openai.OpenAI) -> None:
    served.push("sim:embedder", EMBEDDER)
    bodies: list[Any] = [
        {"model": EMBEDDER, "input": "one", "encoding_format": "float"},
        {"model": EMBEDDER, "input": ["two", "three"], "encoding_format": "base64", "dimensions": 4},
    ]
    lines = [{"custom_id": "e", "method": "POST", "url": EMBEDDINGS, "body": body} for body in bodies]
    lines[1]["custom_id"] = "f"
    file = sdk.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    made = sdk.batches.create(input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h")
    told = lines_of(sdk, ended(sdk, made).output_file_id)
    assert [each["custom_id"] for each in told] == ["e", "f"]
    for body, each in zip(bodies, told, strict=True):
        assert each["response"]["body"] == json.loads(sdk.embeddings.with_raw_response.create(**body).text)


def test_responses_are_those_of_their_route_and_not_kept(sdk: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "input": "one", "instructions": "two", "max_output_tokens": 6, "temperature": 0}
    lines = [{"custom_id": "r", "method": "POST", "url": RESPONSES, "body": body}]
    file = sdk.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    made = sdk.batches.create(input_file_id=file.id, endpoint=RESPONSES, completion_window="24h")
    [answer] = lines_of(sdk, ended(sdk, made).output_file_id)
    told = sdk_responses.Response.model_validate(answer["response"]["body"])
    same = sdk.responses.create(**body, store=False)
    assert (told.output_text, told.status, told.instructions) == (same.output_text, same.status, "two")
    assert told.usage is not None
    assert same.usage is not None
    assert (told.usage.total_tokens, told.store) == (same.usage.total_tokens, False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(told.id)


def test_what_is_cancelled_or_expires_keeps_what_is_done(sdk: openai.OpenAI) -> None:
    lines = [line("first", MODEL), *(line(f"slow{number}", SLOW, max_tokens=4000) for number in range(5))]
    cancelling, expiring = started(sdk, lines), started(sdk, lines, "6s")
    deadline = time.monotonic() + 30
    while (counts := sdk.batches.retrieve(cancelling.id).request_counts) is None or counts.completed < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sdk.batches.cancel(cancelling.id).status == "cancelling"
    for batch, status in ((cancelling, "cancelled"), (expiring, "expired")):
        over = ended(sdk, batch)
        assert over.request_counts is not None
        assert (over.status, over.request_counts.completed, over.request_counts.failed) == (status, 1, 5)
        assert [each["custom_id"] for each in lines_of(sdk, over.output_file_id)] == ["first"]
        errors = lines_of(sdk, over.error_file_id)
        assert [each["custom_id"] for each in errors] == [f"slow{number}" for number in range(5)]
        assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, f"batch_{status}")}
    with pytest.raises(openai.ConflictError) as refused:
        sdk.batches.cancel(expiring.id)
    assert refused.value.code == "batch_state"


def test_a_file_that_is_no_batch_fails_with_its_lines(sdk: openai.OpenAI) -> None:
    batch = ended(sdk, started(sdk, [line("a"), line("a"), line("b") | {"url": "/v1/completions"}]))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.line, each.code) for each in batch.errors.data] == [(2, "duplicate_custom_id"), (3, "mismatched_url")]
    assert batch.output_file_id is None


def test_the_command_runs_a_file_and_shows_what_came_of_it(served: LocalStack, tmp_path: Path) -> None:
    lines = [line(f"r{number}") for number in range(30)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(jsonl(lines))
    lines[3]["body"] |= {"temperature": 9}
    bad.write_bytes(jsonl(lines))
    ran = served.headrace("batch", "run", str(good))
    assert ran.returncode == 0, ran.stderr
    assert "30 of 30 have an answer" in ran.stdout
    assert "30/30" in ran.stderr, "its progress"
    assert len((tmp_path / "good.output.jsonl").read_text().splitlines()) == 30
    assert not (tmp_path / "good.errors.jsonl").exists()
    out, errors = tmp_path / "out", tmp_path / "err"
    ran = served.headrace("batch", "run", str(bad), "--json", "--out", str(out), "--errors", str(errors))
    assert ran.returncode == 1, "one line has an error"
    batch = json.loads(ran.stdout)
    assert batch["request_counts"] == {"total": 30, "completed": 29, "failed": 1}
    assert (len(out.read_text().splitlines()), len(errors.read_text().splitlines())) == (29, 1)
    shown = served.headrace("batch", "output", batch["id"], "--errors")
    assert (shown.returncode, shown.stdout) == (0, errors.read_text())
    assert batch["id"] in served.headrace("batch", "list").stdout
    assert "29 of 30" in served.headrace("batch", "show", batch["id"]).stdout
    refused = served.headrace("batch", "cancel", batch["id"])
    assert refused.returncode == 1
    assert "completed" in refused.stderr
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("no JSON\n")
    ran = served.headrace("batch", "run", str(wrong), "--endpoint", CHAT)
    assert ran.returncode == 1
    assert "line 1: " in ran.stdout
