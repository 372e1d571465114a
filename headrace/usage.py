"""`headrace usage`: what tenants' requests came to."""

import time
from typing import Annotated, Any

import msgspec
import typer

from headrace.globals import with_bus
from headrace.tenants import seconds_of


def usage(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Of one tenant; else of all.")] = None,
    since: Annotated[str, typer.Option(metavar="DURATION", help="How far back, e.g. 90d, 12h, 30m.")] = "30d",
    by: Annotated[str, typer.Option(metavar="day|model|tenant|total", help="A sum for each.")] = "tenant",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Requests, tokens, queue and GPU seconds of what ended of late."""
    from rich.table import Table
    from rich.text import Text

    from headrace.status import console
    from shared import usage as events

    start = time.time() - seconds_of(since, "--since")

    async def read(bus: Any) -> Any:
        await bus.ensure()  # a stack of before the events has no stream for them
        return await events.query(bus, start, tenant, by)  # type: ignore[arg-type]  # it says what it can be

    found = with_bus(context, read)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    names = ("requests", "completed", "prompt tokens", "cached", "output tokens", "queue s", "GPU s")
    table = Table(by, *names, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        counts = (each.requests, each.completed, each.prompt_tokens, each.cached_tokens, each.output_tokens)
        seconds = (f"{each.queue_seconds:.1f}", f"{each.gpu_seconds:.1f}")
        table.add_row(Text(each.group), *map(str, counts), *seconds)
    console().print(table if found else "nothing has ended")
