"""`headrace batch`: files of requests, run when there is room, with what has come of them so far."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace import http
from shared.errors import BadRequest, HeadraceError, Unavailable

if TYPE_CHECKING:
    import httpx

app = typer.Typer(help="Batches: run a file of requests, list, show, cancel, fetch.", no_args_is_help=True)

FILES, BATCHES = "/v1/files", "/v1/batches"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
PROBLEMS_SHOWN = 10
INTERRUPTED = 130  # the exit status after Ctrl-C

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH")]
Input = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A request on each line.")]


@app.command()
def run(
    context: typer.Context,
    file: Input,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Answers (default FILE.output.jsonl).")] = None,
    errors: Annotated[Path | None, typer.Option(metavar="FILE", help="Errors (default FILE.errors.jsonl).")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Default: the url of the first line.")] = None,
    window: Annotated[str, typer.Option(help="After so long it expires: 24h at most, e.g. 30m.")] = "24h",
    as_json: Json = False,
) -> None:
    """Run a file of requests to its end and fetch what came of it; status 1 unless every line has its answer."""
    # a shell that started us in the background left SIGINT ignored, and Python leaves it so
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with http.client(context.obj) as client:
        uploaded = http.patiently(lambda: _upload(client, file))
        asked = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint or _endpoint_of(file),
            "completion_window": window,
        }
        batch = http.call(client, "POST", BATCHES, json=asked)  # twice would be two batches
        try:
            batch = _watch(client, batch)
        except KeyboardInterrupt:
            print(f"{batch['id']} goes on: `headrace batch show`, `output` or `cancel` {batch['id']}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        fetched = {
            "output_file_id": out or file.with_suffix(".output.jsonl"),
            "error_file_id": errors or file.with_suffix(".errors.jsonl"),
        }
        for name, path in fetched.items():
            if batch[name] is not None:
                _fetch(client, batch[name], path)
    if as_json:
        print(http.formatted(batch))
    else:
        _print_end(batch, {name: path for name, path in fetched.items() if batch[name] is not None})
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise typer.Exit(1)


@app.command("list")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The newest ones.")] = 20,
    as_json: Json = False,
) -> None:
    """The batches, the newest first."""
    from rich.table import Table

    from headrace.status import console
    from headrace.tuning import utc

    with http.client(context.obj) as client:
        found = http.patiently(lambda: http.answer(client.get(BATCHES, params={"limit": limit})))["data"]
    if as_json:
        print(http.formatted(found))
        return
    table = Table("id", "status", "endpoint", "total", "completed", "failed", "created", box=None)
    for each in found:
        counts = each["request_counts"]
        numbers = (str(counts[name]) for name in ("total", "completed", "failed"))
        table.add_row(each["id"], each["status"], each["endpoint"], *numbers, utc(each["created_at"]))
    console().print(table if found else "no batches")


@app.command()
def show(context: typer.Context, batch: BatchId, as_json: Json = False) -> None:
    """One batch, and what is wrong with it."""
    with http.client(context.obj) as client:
        found = http.patiently(lambda: http.answer(client.get(f"{BATCHES}/{batch}")))
    if as_json:
        print(http.formatted(found))
    else:
        _print_end(found, {})


@app.command()
def cancel(context: typer.Context, batch: BatchId, as_json: Json = False) -> None:
    """Stop a batch; what is done is kept."""
    with http.client(context.obj) as client:
        found = http.patiently(lambda: http.answer(client.post(f"{BATCHES}/{batch}/cancel")))
    print(http.formatted(found) if as_json else f"{found['id']} is {found['status']}")


@app.command()
def output(
    context: typer.Context,
    batch: BatchId,
    errors: Annotated[bool, typer.Option("--errors", help="The error file instead.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: print it.")] = None,
) -> None:
    """What came of a batch that has ended."""
    with http.client(context.obj) as client:
        found = http.patiently(lambda: http.answer(client.get(f"{BATCHES}/{batch}")))
        file_id = found["error_file_id" if errors else "output_file_id"]
        if file_id is None:
            raise BadRequest(f"{batch} is {found['status']} and has no such file")
        if out is not None:
            _fetch(client, file_id, out)
            return
        with client.stream("GET", f"{FILES}/{file_id}/content") as response:
            if not response.is_success:
                raise http.error_of(response)
            for chunk in response.iter_bytes():
                sys.stdout.buffer.write(chunk)


def _upload(client: "httpx.Client", file: Path) -> dict[str, Any]:
    with open(file, "rb") as content:
        sent = {"file": (file.name, content, "application/jsonl")}
        uploaded: dict[str, Any] = http.answer(client.post(FILES, data={"purpose": "batch"}, files=sent))
    return uploaded


def _endpoint_of(file: Path) -> str:
    """The url of the first line. Raises BadRequest."""
    with open(file, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        raise BadRequest(
            f"the first line of {file} names no url: it says what is asked for, or --endpoint does"
        ) from None
    return str(url)


def _watch(client: "httpx.Client", batch: dict[str, Any]) -> dict[str, Any]:
    """Show how far it has come until it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in ENDED:
            time.sleep(POLL_S)
            batch = http.patiently(lambda: http.answer(client.get(f"{BATCHES}/{batch['id']}")))  # noqa: B023 - at once
            counts = batch["request_counts"]
            failed = f", {counts['failed']} failed" if counts["failed"] else ""
            progress.update(
                task,
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
                description=batch["status"] + failed,
            )
    return batch


def _fetch(client: "httpx.Client", file_id: str, path: Path) -> None:
    """Write a file; all of it, or none."""
    temporary = path.with_name(f".{path.name}.part")

    def get() -> None:
        with open(temporary, "wb") as file, client.stream("GET", f"{FILES}/{file_id}/content") as response:
            if not response.is_success:
                raise http.error_of(response)
            for chunk in response.iter_bytes():
                file.write(chunk)
        if temporary.stat().st_size != int(response.headers["content-length"]):
            raise Unavailable(f"file {file_id} broke off")

    try:
        http.patiently(get)
        temporary.rename(path)
    except (HeadraceError, OSError):
        temporary.unlink(missing_ok=True)
        raise


def _print_end(batch: dict[str, Any], files: dict[str, Path]) -> None:
    counts = batch["request_counts"]
    print(f"{batch['id']} is {batch['status']}: {counts['completed']} of {counts['total']} have an answer,", end=" ")
    print(f"{counts['failed']} an error")
    for path in files.values():
        print(f"    {path}")
    problems = batch["errors"]["data"] if batch["errors"] else []
    for problem in problems[:PROBLEMS_SHOWN]:
        where = f"line {problem['line']}: " if problem["line"] else ""
        print(f"    {where}{problem['message']} ({problem['code']})")
    if len(problems) > PROBLEMS_SHOWN:
        print(f"    and {len(problems) - PROBLEMS_SHOWN} more")
