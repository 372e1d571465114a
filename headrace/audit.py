"""`headrace audit`: who told the platform to change what, and what came of it."""

import time
from typing import Annotated, Any

import msgspec
import typer

from headrace import tuning
from headrace.globals import with_bus
from headrace.tenants import seconds_of


def audit(
    context: typer.Context,
    since: Annotated[str, typer.Option(metavar="DURATION", help="How far back, e.g. 90d, 12h, 30m.")] = "7d",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The control actions of late, the newest last: on versions, aliases, deployments, tenants and keys."""
    from rich.table import Table
    from rich.text import Text

    from headrace.status import console
    from shared import audit as log

    start = time.time() - seconds_of(since, "--since")

    async def read(bus: Any) -> Any:
        await bus.ensure()  # a stack of before the log has none
        return await log.read(bus, start)

    found = with_bus(context, read)
    if as_json:
        shown = [{"at": each.at, **msgspec.to_builtins(each), "result": each.result} for each in found]
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    table = Table("time", "tenant", "by", "action", "target", "result", "detail", box=None)
    for each in found:
        detail = " ".join(f"{name}={value}" for name, value in each.detail.items() if value not in (None, "", [], {}))
        cells = (tuning.utc(each.at), each.tenant, each.by, each.action, each.target, each.result, detail)
        table.add_row(*map(Text, cells))
    console().print(table if found else "nothing was changed")
