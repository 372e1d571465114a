"""`headrace models`: push, list, show, alias, set, decisions, rm, gc."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace import tuning
from headrace.globals import Globals, audited, with_bus
from shared.records import REPLICAS_MAX

if TYPE_CHECKING:
    from shared.audit import Action

app = typer.Typer(help="Register and look at models, on the stack of --data.", no_args_is_help=True)

AVAILABLE_BUDGET_S = 60.0

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def push(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(metavar="PATH|sim:PROFILE", help="A directory with safetensors, a GGUF file, or sim:zero."),
    ],
    name: Annotated[str, typer.Option(help="The model's name.")],
    version: Annotated[str, typer.Option(help="The version's name.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An engine setting, e.g. dtype=float32.")
    ] = None,
    min_replicas: Annotated[int, typer.Option(min=0, max=REPLICAS_MAX, help="Workers that are always there.")] = 0,
    max_replicas: Annotated[
        int | None, typer.Option(min=0, max=REPLICAS_MAX, help="Default: one for each device.")
    ] = None,
    idle_seconds: Annotated[float | None, typer.Option(min=0, help="Idle time until the last worker ends.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the version is available.")] = True,
) -> None:
    """Upload a version and register it."""
    from headrace.push import push_version
    from shared import config
    from shared.errors import BadRequest
    from shared.records import EngineSettings, VersionLimits

    try:
        engine = config.merged(EngineSettings(), dict(tuning.pair(each) for each in set_ or []), "engine")
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint="--set") from error
    limits = VersionLimits(min_replicas=min_replicas, max_replicas=max_replicas, idle_seconds=idle_seconds)
    push_version(
        _globals(context).settings(), source, name, version, engine, limits, AVAILABLE_BUDGET_S if wait else 0.0
    )


@app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """All versions of all models."""
    _show(context, None, as_json)


@app.command()
def show(
    context: typer.Context,
    reference: Annotated[str, typer.Argument(metavar="MODEL[@VERSION]", help="Without a version: all of the model.")],
    as_json: Json = False,
) -> None:
    """The versions of one model, with what is set of them."""
    _show(context, reference, as_json)


@app.command()
def alias(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    name: Annotated[str, typer.Argument(metavar="ALIAS")],
    version: Annotated[str | None, typer.Argument(metavar="VERSION")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the alias.")] = False,
) -> None:
    """Point an alias at a version, so that MODEL@ALIAS is that version. The plain MODEL is the alias `stable`."""
    from shared import registry

    if (version is None) != delete:
        raise typer.BadParameter("give a VERSION, or --delete")
    action: Action = "alias.remove" if delete else "alias.set"
    given = {} if version is None else {"version": version}
    route = audited(
        context, action, f"{model}@{name}", lambda bus: registry.set_alias(bus, model, name, version), **given
    )
    for alias_name, target in sorted(route.aliases.items()):
        print(f"{model}@{alias_name} -> {target}")


app.command("set")(tuning.set_)
app.command()(tuning.decisions)


@app.command()
def rm(
    context: typer.Context,
    reference: Annotated[str, typer.Argument(metavar="MODEL[@VERSION]", help="Without a version: all of the model.")],
) -> None:
    """Remove a version that nothing uses: no alias, no traffic, no worker, no request. Its files go too."""
    from headrace import garbage
    from shared import registry
    from shared.objects import ObjectStore

    model, at, version = reference.partition("@")
    if at and not version:
        raise typer.BadParameter("there is no version after the @", param_hint="MODEL[@VERSION]")
    objects = ObjectStore(_globals(context).settings())

    async def work(bus: Any) -> Any:
        return [
            (removed, await garbage.delete_files(bus, objects, removed))
            for removed in await registry.remove(bus, model, version or None)
        ]

    for removed, deleted in audited(context, "version.remove", reference, work):
        print(f"removed {removed.model}@{removed.version}{_freed(deleted)}")


@app.command()
def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
) -> None:
    """Delete objects that no version needs and that are older than an hour: what broken pushes left behind."""
    from headrace import garbage
    from shared.objects import ObjectStore

    objects = ObjectStore(_globals(context).settings())
    found = with_bus(context, lambda bus: garbage.collect(bus, objects, dry_run))
    for one in found:
        print(f"{'would delete' if dry_run else 'deleted'} {one.key} ({one.size} bytes)")
    print(f"{len(found)} objects, {sum(one.size for one in found)} bytes")


def _freed(deleted: list[Any]) -> str:
    return f", and {sum(one.size for one in deleted)} bytes of files" if deleted else ""


def _show(context: typer.Context, reference: str | None, as_json: bool) -> None:
    from headrace.status import console, model_status, models_table
    from shared import registry
    from shared.errors import ModelNotFound, VersionNotFound

    model, at, name = reference.partition("@") if reference is not None else (None, "", "")

    async def read(bus: Any) -> Any:
        return await registry.list_versions(bus, model), await registry.list_routes(bus)

    versions, routes = with_bus(context, read)
    if model is not None and not versions:
        raise ModelNotFound(f"there is no model {model}")
    if at:
        versions = [version for version in versions if version.version == name]
    if at and not versions:
        raise VersionNotFound(f"{model} has no version {name}")
    if as_json:
        shown = [
            msgspec.to_builtins(version) | msgspec.to_builtins(model_status(version, routes.get(version.model)))
            for version in versions
        ]
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        console().print(models_table([model_status(version, routes.get(version.model)) for version in versions]))
        for line in [line for version in versions if model is not None for line in tuning.config_lines(version)]:
            print(line)


def _globals(context: typer.Context) -> Globals:
    found: Globals = context.obj
    return found
