"""`headrace dlq`: requests that were given up, and why; run one again."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from headrace.globals import with_bus
from shared import subjects, wire
from shared.claim_check import ClaimCheck
from shared.errors import NotFound

app = typer.Typer(help="Requests that were given up.", no_args_is_help=True)

LIST_MAX = 1000

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Sequence = Annotated[int, typer.Argument(metavar="SEQ", min=1, help="As `headrace dlq list` shows it.")]
Body = Annotated[bool, typer.Option("--body", help="Print what people wrote and were answered, too.")]


class DeadLetter(msgspec.Struct):
    """A request in the DLQ. `rid` and what comes from its body are None for what is not a request."""

    seq: int
    time: str
    model: str
    version: str
    tenant: str
    reason: str
    bytes: int
    rid: str | None
    input: str | None  # its kind and size; no content
    sampling: wire.Sampling | None
    headers: dict[str, str]
    body: wire.Input | None = None  # only when asked for


@app.command("list")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=LIST_MAX, help="The oldest so many.")] = 100,
    as_json: Json = False,
) -> None:
    """What was given up, oldest first. No prompts are shown."""
    from rich.console import Console
    from rich.table import Table

    letters = with_bus(context, lambda bus: read_all(bus, limit))
    if as_json:
        _print_json(letters)
        return
    table = Table("seq", "time", "model", "tenant", "rid", "bytes", "reason", box=None)
    for letter in letters:
        name = f"{letter.model}@{letter.version}"
        when = letter.time.split(".")[0]
        table.add_row(str(letter.seq), when, name, letter.tenant, letter.rid or "-", str(letter.bytes), letter.reason)
    Console().print(table if letters else "nothing was given up")


@app.command()
def show(context: typer.Context, seq: Sequence, body: Body = False, as_json: Json = False) -> None:
    """All that is known of one; its prompt only with --body."""
    letter, given = with_bus(context, lambda bus: read_one(bus, seq, body))
    if body:
        letter.body = given
    if as_json:
        _print_json(letter)
        return
    for name, value in msgspec.to_builtins(letter).items():
        if value is not None and name != "headers":
            print(f"{name}: {value}")
    for name, value in letter.headers.items():
        print(f"{name}: {value}")


@app.command()
def requeue(context: typer.Context, seq: Sequence, body: Body = False) -> None:
    """Run one again, as a new request; it leaves the DLQ once it is complete.

    Whoever asked for it is gone: the command itself waits for the answer, and prints it with --body.
    """

    async def work(bus: Any) -> str:
        from shared.dispatch import Dispatcher

        dispatcher = Dispatcher(bus, bus.settings)
        await dispatcher.start()
        try:
            return await run_again(bus, dispatcher, seq, print if body else None)
        finally:
            await dispatcher.close()

    print(with_bus(context, work))


async def read_all(bus: Any, limit: int) -> list[DeadLetter]:
    """The oldest `limit` of the DLQ. Raises Unavailable."""
    letters: list[DeadLetter] = []
    sequence = 1
    while len(letters) < limit:
        message = await bus.next_message(subjects.DLQ_STREAM, subjects.DLQ_SUBJECTS, sequence)
        if message is None:
            break
        letters.append(describe(message)[0])
        sequence = message.seq + 1
    return letters


async def read_one(bus: Any, seq: int, whole: bool) -> tuple[DeadLetter, wire.Input | None]:
    """One of the DLQ and (`whole`) its input. Raises NotFound, StreamGone and Unavailable."""
    message = await bus.get_message(subjects.DLQ_STREAM, seq)
    if message is None:
        raise NotFound(f"the DLQ has no message {seq}")
    letter, request = describe(message)
    if request is None or not whole:
        return letter, None
    return letter, (await _opened(bus, letter, request)).input


async def run_again(bus: Any, dispatcher: Any, seq: int, show_text: Callable[[str], None] | None) -> str:
    """Publish one again under a fresh rid and wait for its answer; what came of it, in a line.

    Raises NotFound, StreamGone, and the error that it ended with: then it stays in the DLQ.
    """
    message = await bus.get_message(subjects.DLQ_STREAM, seq)
    if message is None:
        raise NotFound(f"the DLQ has no message {seq}")
    letter, request = describe(message)
    if request is None:
        raise NotFound(f"message {seq} of the DLQ is not a request: it cannot be run")
    request = await _opened(bus, letter, request)
    again = msgspec.structs.replace(request, rid=wire.new_id(), framing=b"")
    stream = await dispatcher.submit(again, letter.tenant)
    texts = [""] * again.sampling.n
    try:
        while True:
            for delta in await stream.next():
                texts[delta.choice] += delta.text
    except StopAsyncIteration:
        await ClaimCheck(bus).delete_read(subjects.DLQ_STREAM, message)
    finally:
        stream.leave()
    if show_text is not None:
        for text in texts:
            show_text(text)
    tokens = stream.usage.completion_tokens if stream.usage is not None else 0
    return f"{seq} ran as {again.rid}: complete, {tokens} tokens, {stream.claims} claims; it is out of the DLQ"


def describe(message: Any) -> tuple[DeadLetter, wire.Request | None]:
    """What a message of the DLQ is, and its request if it is one."""
    _, model, version, tenant = message.subject.split(".")
    request: wire.Request | None = None
    try:
        request = wire.decode_request(message.data, message.headers, subjects.decode_token(version))
    except ValueError:  # of the decoders, too
        request = None  # that may be why it is here
    headers = dict(message.headers)
    letter = DeadLetter(
        seq=message.seq,
        time=message.time,
        model=_name(model),
        version=_name(version),
        tenant=_name(tenant),
        reason=headers.pop(wire.HEADER_REASON, ""),
        bytes=len(message.data),
        rid=None if request is None else request.rid,
        input=None if request is None else _size(request),
        sampling=None if request is None else request.sampling,
        headers=headers,
    )
    return letter, request


async def _opened(bus: Any, letter: DeadLetter, request: wire.Request) -> wire.Request:
    return await ClaimCheck(bus).open(request, letter.tenant)


def _name(token: str) -> str:
    """Of a subject's token; the token itself where it is none of ours, which may be why the message is here."""
    try:
        return subjects.decode_token(token)
    except ValueError:
        return token


def _size(request: wire.Request) -> str:
    given = request.input
    if request.stored is not None:
        return f"{request.stored.size} bytes in the object store"
    if given.messages is not None:
        return f"{len(given.messages)} messages, {sum(len(each.content or '') for each in given.messages)} characters"
    if given.prompt is not None:
        return f"a prompt of {len(given.prompt)} characters"
    return f"{len(given.token_ids or [])} token ids"


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
