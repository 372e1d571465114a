"""`headrace routes`: where the traffic of each model goes; and the same for publishers that know only a model's name."""

from typing import Annotated, Any

import msgspec
import typer

from headrace.globals import with_bus
from shared.records import Route

app = typer.Typer(help="Where traffic goes: list, nats-mapping.", no_args_is_help=True)

Model = Annotated[str | None, typer.Option(metavar="MODEL", help="This model only.")]


@app.command("list")
def list_(
    context: typer.Context,
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The weights and aliases of each model, and the versions that were rolled back."""
    from rich.table import Table

    from headrace.status import console

    found = _read(context, model)
    if as_json:
        shown = [
            {
                "model": route.model,
                "weights": {weight.version: weight.basis_points / 100 for weight in route.weights},
                "aliases": route.aliases,
                "withdrawn": route.withdrawn,
                "deployment": route.deployment or None,
                "rolling": route.rolling,
            }
            for route in found
        ]
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    table = Table("model", "traffic", "aliases", "rollout", "withdrawn", box=None)
    for route in found:
        table.add_row(
            route.model,
            " ".join(f"{weight.version}={weight.basis_points / 100:g}%" for weight in route.weights),
            " ".join(f"{alias}={version}" for alias, version in sorted(route.aliases.items())),
            route.deployment if route.rolling else "-",
            "; ".join(f"{version}: {why}" for version, why in sorted(route.withdrawn.items())) or "-",
        )
    console().print(table if found else "no model")


@app.command("nats-mapping")
def nats_mapping(context: typer.Context, model: Model = None) -> None:
    """A fragment of nats-server's configuration: publishers send to a model's name, the server chooses the version.

    Include it in the account of such publishers, and reload the server when weights have changed.
    """
    from headrace.nats_mapping import fragment

    print(fragment(_read(context, model)), end="")


def _read(context: typer.Context, model: str | None) -> list[Route]:
    from shared import registry
    from shared.errors import ModelNotFound

    async def read(bus: Any) -> dict[str, Route]:
        return await registry.list_routes(bus)

    found = with_bus(context, read)
    if model is not None and model not in found:
        raise ModelNotFound(f"there is no model {model}", param="model")
    return [route for name, route in sorted(found.items()) if model in (None, name)]
