"""`headrace audit`: who told the platform to change what, and what came of it."""

import time
from collections.abc import Iterator
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
    """The control actions of late, the newest last: on versions, aliases, deployments, tenants and keys.

    The table says briefly what was changed, --json all of it.
    """
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
        detail = in_words(each.detail)
        cells = (tuning.utc(each.at), each.tenant, each.by, each.action, each.target, each.result, detail)
        table.add_row(*map(Text, cells))
    console().print(table if found else "nothing was changed")


def in_words(detail: dict[str, Any]) -> str:
    """What was changed, in a few words: nothing that is as usual, and of a deployment's steps the shares."""
    from shared.rollouts import Gates

    usual = dict(_flat("gates", msgspec.to_builtins(Gates())))
    words = []
    for given, whole in detail.items():
        for name, value in _flat(given, whole):
            if value in ("", [], {}) or (value is None and name == given) or usual.get(name, ...) == value:
                continue
            words.append(f"{name}={_brief(name, value)}")
    return " ".join(words)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`value` with its name; each of its fields if it has some."""
    if isinstance(value, dict) and value:
        for field, inner in value.items():
            yield from _flat(f"{name}.{field}", inner)
    else:
        yield name, value


def _brief(name: str, value: Any) -> str:
    if value is None:
        return "off" if name.startswith("gates.") else "default"
    if not isinstance(value, list):
        return str(value)
    if name == "steps":
        return ",".join(f"{step['pct']:g}" for step in value)
    return ",".join(map(str, value)) if not isinstance(value[0], dict) else f"({len(value)})"
