"""`headrace jobs`: requests that nobody waits for, over HTTP."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace import http, tuning

if TYPE_CHECKING:
    import httpx

app = typer.Typer(help="Jobs: submit, list, show, wait, cancel, delete.", no_args_is_help=True)

JOBS = "/v1/jobs"
WAIT_S = 30  # of one request for the end of a job
UNTIL_ENDED = ("queued", "running")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB")]


@app.command()
def submit(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="MODEL, MODEL@VERSION or MODEL@ALIAS; with --body also `-`.")],
    prompt: Annotated[str | None, typer.Argument(help="What to answer; else it is read from --body.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the answer.")] = 512,
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="The route that --body could be posted to.")
    ] = "/v1/chat/completions",
    body: Annotated[
        Path | None, typer.Option(metavar="FILE.json", exists=True, dir_okay=False, help="The whole request.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help="To be told of its end.")] = None,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", min=1, help="How long it is kept after it.")] = None,
    deadline: Annotated[int | None, typer.Option(metavar="SECONDS", min=1, help="It expires after so long.")] = None,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", metavar="KEY", help="Submitted again, it is one job.")
    ] = None,
    wait_too: Annotated[bool, typer.Option("--wait", help="Wait for its end, and print the answer.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a request, and be told its id."""
    if (prompt is None) == (body is None):
        raise typer.BadParameter("either a prompt or --body", param_hint="PROMPT")
    if body is not None:
        asked = _read(body)
        if model != "-":
            asked["model"] = model
    else:
        asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    order: dict[str, Any] = {"endpoint": endpoint, "body": asked}
    given = {
        "webhook": {"url": webhook} if webhook else None,
        "ttl_seconds": ttl,
        "deadline_seconds": deadline,
    }
    order |= {name: value for name, value in given.items() if value is not None}
    with http.client(context.obj) as client:
        job = http.call(client, "POST", JOBS, json=order, headers={"idempotency-key": key} if key else {})
        if wait_too:
            job = until_ended(client, job["id"], None)
    _print_ended(job, as_json) if wait_too else _print(job, as_json)


@app.command("list")
def list_(
    context: typer.Context,
    status: Annotated[
        str | None, typer.Option(help="queued, running, completed, failed, cancelled or expired.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """The jobs, the newest first."""
    from rich.table import Table

    from headrace.status import console, short

    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {"status": status} if status else {}
    with http.client(context.obj) as client:
        while len(found) < limit:
            page = http.call(client, "GET", JOBS, params=query | {"limit": min(100, limit - len(found))})
            found += page["data"]
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
    if as_json:
        print(http.formatted(found))
        return
    table = Table("id", "model", "endpoint", "status", "tokens", "created", "ended", "error", box=None)
    for job in found:
        table.add_row(
            job["id"],
            job["model"],
            job["endpoint"],
            job["status"],
            str(job["progress"]["tokens"]),
            tuning.utc(job["created_at"]),
            tuning.utc(job["ended_at"]) if job["ended_at"] else "",
            short(job["error"]["message"]) if job["error"] else "",
        )
    console().print(table if found else "no jobs")


@app.command()
def show(context: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """One job; its answer once it has ended."""
    with http.client(context.obj) as client:
        _print(http.call(client, "GET", f"{JOBS}/{job_id}"), as_json)


@app.command()
def wait(
    context: typer.Context,
    job_id: JobId,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="Status 1 after so long.")] = None,
    as_json: Json = False,
) -> None:
    """Wait for the end of a job and print its answer. Status 1 if it is none."""
    with http.client(context.obj) as client:
        _print_ended(until_ended(client, job_id, timeout), as_json)


@app.command()
def cancel(context: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """End a job, wherever it is."""
    with http.client(context.obj) as client:
        _print(http.call(client, "POST", f"{JOBS}/{job_id}/cancel"), as_json)


@app.command()
def delete(context: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """Delete a job that has ended, and its answer; one that has not is ended."""
    with http.client(context.obj) as client:
        gone = http.call(client, "DELETE", f"{JOBS}/{job_id}")
    if as_json:
        print(http.formatted(gone))
    else:
        print(f"{job_id}: {gone['status']}{', and deleted' if gone['deleted'] else ''}")


def until_ended(client: "httpx.Client", job_id: str, timeout_s: float | None) -> dict[str, Any]:
    """The job once it has ended, or as it is after so long. Raises HeadraceError."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = WAIT_S if until is None else min(WAIT_S, max(0.0, until - time.monotonic()))
        job = http.call(client, "GET", f"{JOBS}/{job_id}", params={"wait": f"{left_s:.3f}"})
        if job["status"] not in UNTIL_ENDED or (until is not None and time.monotonic() >= until):
            return job


def text_of(answer: dict[str, Any]) -> str:
    """What an answer says, for people: the text of its choices, or all of it as JSON."""
    if "text" in answer:
        return str(answer["text"])
    if answer.get("type") == "message":
        return "".join(block.get("text", "") for block in answer["content"])
    texts = [choice.get("text") or (choice.get("message") or {}).get("content") for choice in answer.get("choices", [])]
    if texts and None not in texts:
        return "\n".join(map(str, texts))
    return http.formatted(answer)


def _print(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(http.formatted(job))
        return
    print(f"{job['id']}: {job['status']}, {job['progress']['tokens']} tokens, {job['model']} at {job['endpoint']}")
    if job["error"]:
        print(f"{job['error']['code']}: {job['error']['message']}")
    if job.get("result"):
        print(text_of(job["result"]))


def _print_ended(job: dict[str, Any], as_json: bool) -> None:
    """The answer alone, so that it can be piped; status 1 if there is none."""
    if as_json:
        print(http.formatted(job))
    elif job["status"] == "completed":
        print(text_of(job["result"]))
    else:
        said = f": {job['error']['message']}" if job["error"] else " still"
        print(f"headrace: job {job['id']} is {job['status']}{said}", file=sys.stderr)
    if job["status"] != "completed":
        raise typer.Exit(1)


def _read(body: Path) -> dict[str, Any]:
    try:
        asked = json.loads(body.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{body} is not JSON: {error}", param_hint="--body") from error
    if not isinstance(asked, dict):
        raise typer.BadParameter(f"{body} is no JSON object", param_hint="--body")
    return asked
