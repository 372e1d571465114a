"""`headrace tenants`: who may ask for what. A key is printed once, when it is made."""

import re
import time
from typing import Annotated, Any

import msgspec
import typer

from headrace import tuning
from headrace.globals import with_bus
from shared.tenants import Limits, Role

app = typer.Typer(
    help="Tenants, their limits and their keys: add, list, show, set, issue, rotate, revoke, rm.", no_args_is_help=True
)

ROLES: tuple[Role, ...] = ("infer", "deploy", "admin")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[smhd]?)")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(metavar="TENANT")]
KeyId = Annotated[str, typer.Argument(metavar="KEY-ID", help="As `tenants show` lists it; not the key itself.")]
Weight = Annotated[float | None, typer.Option(help="Its part of what several want (default 1).")]
Priority = Annotated[int | None, typer.Option(min=-100, max=100, help="The higher goes first (default 0).")]
Requests = Annotated[int | None, typer.Option("--requests-per-minute", min=1)]
Tokens = Annotated[int | None, typer.Option("--tokens-per-minute", min=1, help="Of prompt and output.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests that have not ended.")]
QueueMax = Annotated[int | None, typer.Option(min=1, help="Requests that wait for a worker.")]
RoleOption = Annotated[str, typer.Option(metavar="|".join(ROLES), help="What the key is good for.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only for this model; may be given again.")]
Expires = Annotated[str | None, typer.Option(metavar="DURATION", help="E.g. 90d, 12h (default: never).")]
Note = Annotated[str, typer.Option(help="To remember what it is for.")]


@app.command()
def add(
    context: typer.Context,
    name: Name,
    weight: Weight = None,
    priority: Priority = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    queue_max: QueueMax = None,
    role: RoleOption = "infer",
    models: Models = None,
    expires: Expires = None,
    note: Note = "",
    no_key: Annotated[bool, typer.Option("--no-key", help="Make no first key.")] = False,
    as_json: Json = False,
) -> None:
    """Add a tenant, with a first key, which is printed once."""
    from shared import audit, tenancy
    from shared.tenancy import NewKey, NewTenant

    limits = _limits(requests, tokens, concurrency, queue_max)
    changes = {"weight": weight, "priority": priority, "limits": limits}
    given = {key: value for key, value in changes.items() if value is not None}
    asked = _checked({"name": name, **given}, NewTenant)
    wanted = _checked(_key_fields(role, models, expires, note), NewKey) if not no_key else None

    async def work(bus: Any) -> Any:
        await bus.ensure()
        actor = audit.cli_actor()
        tenant = await tenancy.add(bus, actor, asked)
        return tenant, await tenancy.issue(bus, actor, name, wanted) if wanted is not None else None

    tenant, issued = with_bus(context, work)
    if issued is not None:
        _print_key(name, issued, as_json)
    elif as_json:
        _print_json(_entry(tenant))
    else:
        print(f"added {name}, without a key")


@app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """All tenants."""
    from rich.table import Table
    from rich.text import Text

    from headrace.status import console
    from shared import tenancy

    found = [_entry(each) for each in with_bus(context, tenancy.list_all)]
    if as_json:
        _print_json(found)
        return
    table = Table("tenant", "weight", "priority", "limits", "keys", box=None)
    for each in found:
        active = sum(key.state == "active" for key in each.keys)
        keys = f"{active}/{len(each.keys)}"
        table.add_row(Text(each.name), f"{each.weight:g}", str(each.priority), _limits_line(each), keys)
    console().print(table if found else "no tenants")


@app.command()
def show(context: typer.Context, name: Name, as_json: Json = False) -> None:
    """One tenant with its keys, less what they are."""
    from rich.table import Table
    from rich.text import Text

    from headrace.status import console
    from shared import tenancy

    found = _entry(with_bus(context, lambda bus: tenancy.find(bus, name)))
    if as_json:
        _print_json(found)
        return
    print(f"{found.name}: weight {found.weight:g}, priority {found.priority}, {_limits_line(found)}")
    table = Table("key", "role", "models", "state", "created", "expires", "note", box=None)
    for key in found.keys:
        expires = tuning.utc(key.expires) if key.expires else "never"
        created = tuning.utc(key.created)
        models = Text(" ".join(key.models) or "all")
        table.add_row(key.id, key.role, models, key.state, created, expires, Text(key.note))
    console().print(table if found.keys else "no keys")


@app.command("set")
def set_(
    context: typer.Context,
    name: Name,
    weight: Weight = None,
    priority: Priority = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    queue_max: QueueMax = None,
    unset: Annotated[list[str] | None, typer.Option(metavar="LIMIT", help="Back to the default.")] = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's weight, priority or limits."""
    from shared import audit, tenancy
    from shared.tenancy import TenantChanges

    limits: dict[str, Any] = dict(_limits(requests, tokens, concurrency, queue_max))
    for each in (one.removeprefix("--").replace("-", "_") for one in unset or []):
        if each not in Limits.__struct_fields__:
            raise typer.BadParameter(
                f"no limit {each!r}: there are {', '.join(Limits.__struct_fields__)}", param_hint="--unset"
            )
        limits[each] = None
    fields = {"weight": weight, "priority": priority}
    given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    if not given and not limits:
        raise typer.BadParameter("give something to change")
    changes = _checked({**given, "limits": limits}, TenantChanges)
    changed = _entry(with_bus(context, lambda bus: tenancy.change(bus, audit.cli_actor(), name, changes)))
    if as_json:
        _print_json(changed)
    else:
        print(f"{changed.name}: weight {changed.weight:g}, priority {changed.priority}, {_limits_line(changed)}")


@app.command()
def issue(
    context: typer.Context,
    name: Name,
    role: RoleOption = "infer",
    models: Models = None,
    expires: Expires = None,
    note: Note = "",
    as_json: Json = False,
) -> None:
    """Make another key for a tenant; it is printed once."""
    from shared import audit, tenancy
    from shared.tenancy import NewKey

    asked = _checked(_key_fields(role, models, expires, note), NewKey)
    _print_key(name, with_bus(context, lambda bus: tenancy.issue(bus, audit.cli_actor(), name, asked)), as_json)


@app.command()
def rotate(
    context: typer.Context,
    name: Name,
    id_: KeyId,
    grace: Annotated[str, typer.Option(metavar="DURATION", help="How long the old key is still good.")] = "1h",
    as_json: Json = False,
) -> None:
    """Replace a key by a new one like it, which is printed once."""
    from shared import audit, tenancy
    from shared.tenancy import Rotation

    seconds = _checked({"grace_seconds": seconds_of(grace, "--grace")}, Rotation).grace_seconds
    issued = with_bus(context, lambda bus: tenancy.rotate(bus, audit.cli_actor(), name, id_, seconds))
    _print_key(name, issued, as_json)


@app.command()
def revoke(context: typer.Context, name: Name, id_: KeyId, as_json: Json = False) -> None:
    """End a key, at every ingress at once. Streams that run go on."""
    from shared import audit, tenancy
    from shared.tenant_views import key_entry

    revoked = with_bus(context, lambda bus: tenancy.revoke(bus, audit.cli_actor(), name, id_))
    if as_json:
        _print_json(key_entry(revoked, time.time()))
    else:
        print(f"revoked {revoked.id} of {name}")


@app.command()
def rm(context: typer.Context, name: Name) -> None:
    """Remove a tenant, its keys, files, batches, jobs and responses; it takes 15 s."""
    from shared import audit, tenancy

    with_bus(context, lambda bus: tenancy.remove(bus, audit.cli_actor(), name))
    print(f"removed {name}")


def _entry(tenant: Any) -> Any:
    from shared.tenant_views import tenant_entry

    return tenant_entry(tenant, time.time())


def _limits(requests: int | None, tokens: int | None, concurrency: int | None, queue: int | None) -> dict[str, int]:
    limits = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "concurrency": concurrency,
        "queue_max": queue,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _limits_line(entry: Any) -> str:
    limits = {name: getattr(entry.limits, name) for name in Limits.__struct_fields__}
    return " ".join(f"{name}={value}" for name, value in limits.items() if value is not None) or "limits as by default"


def _key_fields(role: str, models: list[str] | None, expires: str | None, note: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": role, "models": models or [], "note": note}
    return fields if expires is None else fields | {"expires_seconds": seconds_of(expires, "--expires")}


def _checked(values: dict[str, Any], kind: Any) -> Any:
    """`values` as a struct. Raises BadParameter."""
    from shared import refusals

    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        place, problem = refusals.read(str(error), kind)
        raise typer.BadParameter(problem, param_hint=f"--{place.replace('_', '-')}" if place else None) from None


def seconds_of(text: str, option: str) -> float:
    """The seconds of a duration such as 12h."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not like 90d, 12h, 30m or 45s", param_hint=option)
    return float(found["count"]) * UNITS[found["unit"] or "s"]


def _print_key(tenant: str, issued: Any, as_json: bool) -> None:
    from shared.tenant_views import issued_key

    shown = issued_key(tenant, issued, time.time())
    if as_json:
        _print_json(shown)
        return
    until = f", good until {tuning.utc(shown.expires)}" if shown.expires else ""
    print(
        f"{shown.key}\n\nthe key {shown.id} of {tenant}, role {shown.role}, models {', '.join(shown.models) or 'all'}{until}"
    )
    print("It is told this once. Clients send it as `Authorization: Bearer`, commands take it from HEADRACE_API_KEY.")


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
