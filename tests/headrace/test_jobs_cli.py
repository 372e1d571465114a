"""`headrace jobs` against an ingress that is made up here, but for the last test."""

import json
from typing import Any

import httpx
import pytest

from headrace import http, jobs
from shared.errors import JobNotFound, Unavailable

JOB = {"id": "a" * 32, "status": "running", "progress": {"tokens": 3, "claims": 1}, "error": None}


def client(*answers: tuple[int, Any]) -> tuple[httpx.Client, list[httpx.Request]]:
    """A client of an ingress that gives these answers, one after the other; and what it was asked."""
    waiting, asked = list(answers), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        status, body = waiting.pop(0)
        return httpx.Response(status, content=body) if isinstance(body, bytes) else httpx.Response(status, json=body)

    return httpx.Client(base_url="http://ingress", transport=httpx.MockTransport(answer)), asked


def test_the_end_of_a_job_is_waited_for_as_long_as_it_takes_or_as_asked() -> None:
    over, asked = client((200, JOB), (200, JOB), (200, JOB | {"status": "completed"}))
    assert jobs.until_ended(over, JOB["id"], None)["status"] == "completed"
    assert [request.url.params["wait"] for request in asked] == ["30.000"] * 3
    over, asked = client((200, JOB))
    assert jobs.until_ended(over, JOB["id"], 0.0)["status"] == "running"
    assert asked[0].url.params["wait"] == "0.000"


def test_what_is_refused_and_what_is_no_answer_are_errors() -> None:
    over, _ = client((404, {"error": {"code": "job_not_found", "message": "gone", "param": None}}), (502, b"<html>"))
    with pytest.raises(JobNotFound, match="gone"):
        http.call(over, "GET", "/v1/jobs/x")
    with pytest.raises(Unavailable, match="http://ingress/v1/jobs/x answered 502: <html>"):
        http.call(over, "GET", "/v1/jobs/x")
    over, _ = client((200, b"<html>"), (500, {"detail": "of a proxy"}))
    for _ in range(2):
        with pytest.raises(Unavailable, match="answered"):
            http.call(over, "GET", "/v1/jobs/x")
    with (
        httpx.Client(base_url="http://127.0.0.1:9") as nobody,
        pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/v1/jobs cannot be reached"),
    ):
        http.call(nobody, "GET", "/v1/jobs")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"text": "native"}, "native"),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, "a\nb"),
        ({"choices": [{"message": {"content": "said"}}]}, "said"),
        (
            {"type": "message", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "blocks"}]},
            "in blocks",
        ),
    ],
)
def test_the_text_of_an_answer_is_printed_whatever_its_shape(answer: dict[str, Any], text: str) -> None:
    assert jobs.text_of(answer) == text


def test_an_answer_without_text_is_printed_whole() -> None:
    called = {"choices": [{"message": {"content": None, "tool_calls": [{"id": "c"}]}}]}
    assert json.loads(jobs.text_of(called)) == called


@pytest.mark.e2e
def test_jobs_from_the_command_line(stack: Any) -> None:
    stack.push("sim:fixed-50ms", "worked")
    ran = stack.headrace("jobs", "submit", "worked", "say something", "--max-tokens", "7", "--wait")
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 2
    made = json.loads(stack.headrace("jobs", "submit", "worked", "endless", "--max-tokens", "4000", "--json").stdout)
    waited = stack.headrace("jobs", "wait", made["id"], "--timeout", "0.2")
    assert (waited.returncode, made["id"] in waited.stderr) == (1, True)
    cancelled = json.loads(stack.headrace("jobs", "cancel", made["id"], "--json").stdout)
    assert cancelled["status"] == "cancelled"
    listed = json.loads(stack.headrace("jobs", "list", "--limit", "2", "--json").stdout)
    assert [job["status"] for job in listed] == ["cancelled", "completed"]
    assert made["id"] in stack.headrace("jobs", "list", "--status", "cancelled").stdout
    shown = json.loads(stack.headrace("jobs", "show", listed[1]["id"], "--json").stdout)
    assert shown["result"]["choices"][0]["message"]["content"] == ran.stdout.removesuffix("\n")
    assert "deleted" in stack.headrace("jobs", "delete", made["id"]).stdout
    gone = stack.headrace("jobs", "show", made["id"])
    assert (gone.returncode, "no job" in gone.stderr) == (1, True)
