"""`headrace deploy`, `headrace rollback`, `headrace deployments`: how traffic moves to another version, by hand."""

import os
import sys
from typing import Annotated, Any, get_args

import msgspec
import typer
from msgspec.structs import replace

from headrace import tuning
from headrace.globals import with_bus
from shared import refusals
from shared.rollouts import DEFAULT_STEPS, Command, Deployment, Finding, Gates, NewDeployment, Step, Strategy
from shared.webhooks import Webhook

app = typer.Typer(help="Rollouts: list, show, watch, pause, resume, promote.", no_args_is_help=True)

STRATEGIES = ", ".join(get_args(Strategy))
INTERRUPTED = 130  # the exit status after Ctrl-C
WEBHOOK_SECRET = "HEADRACE_WEBHOOK_SECRET"  # a variable: others can read command lines

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reference = Annotated[str, typer.Argument(metavar="ID|MODEL", help="A deployment, or the model whose goes on.")]


def deploy(
    context: typer.Context,
    target: tuning.Target,
    strategy: Annotated[str, typer.Option(help=f"One of {STRATEGIES}.")] = "canary",
    steps: Annotated[
        str | None, typer.Option(metavar="PCT,PCT,...", help="Shares of the traffic, the last one 100.")
    ] = None,
    soak: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="At each step, at least.")] = None,
    requests_min: Annotated[
        int | None, typer.Option(min=0, help="Requests of the version that end at each step, at least.")
    ] = None,
    bake: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="At 100%, before it is promoted.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="E.g. error_rate.max=0.02, ttft_p99.ratio_max=2, tpot_p99=off."),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Told of each change; signed with HEADRACE_WEBHOOK_SECRET (whsec_...)."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look on until it ends; status 1 if it is not promoted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Move a model's traffic to a version, step by step; back at once if its numbers are bad."""
    from shared import audit, deployment_views, deployments

    model, version = tuning.named(target)
    asked = NewDeployment(
        model=model,
        version=version,
        strategy=_strategy(strategy),
        steps=steps_of(_strategy(strategy), steps, soak, requests_min),
        bake_seconds=bake,
        gates=gates_of(gate or []),
        webhook=Webhook(url=webhook, secret=os.environ.get(WEBHOOK_SECRET)) if webhook is not None else None,
    )

    async def create(bus: Any) -> Deployment:
        async with audit.deployment(bus, audit.cli_actor(), asked) as note:
            made = await deployments.create(bus, asked)
            note.target = made.id
        return made

    made = with_bus(context, create)
    if watch:
        _watch(context, made.id, as_json)
    elif as_json:
        _print_json(deployment_views.entry(made))
    else:
        shares = ", ".join(f"{step.pct:g}%" for step in made.steps)
        print(f"{made.id}: {model}@{version} takes over from {made.stable} by {made.strategy}: {shares}")
        print(f"`headrace deployments watch {made.id}` shows it, `headrace rollback {made.id}` takes it back")


def rollback(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """Take a model's traffic back from the version it was moved to: all of it, at once."""
    _command(context, reference, "rollback", as_json)


@app.command("list")
def list_(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Of this model only.")] = None,
    as_json: Json = False,
) -> None:
    """The deployments, the newest first."""
    from rich.table import Table

    from headrace.status import console, short
    from shared import deployment_views, deployments

    found = with_bus(context, lambda bus: deployments.list_deployments(bus, model))[::-1]
    if as_json:
        _print_json([deployment_views.entry(each) for each in found])
        return
    table = Table("id", "version", "over", "strategy", "state", "step", "traffic", "since", "reason", box=None)
    for each in found:
        table.add_row(
            each.id,
            f"{each.model}@{each.version}",
            each.stable,
            each.strategy,
            each.state,
            f"{each.step + 1}/{len(each.steps)}",
            f"{each.basis_points / 100:g}%",
            tuning.utc(each.since),
            short(each.reason),
        )
    console().print(table if found else "no deployments")


@app.command()
def show(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """One, with its history and the evidence."""
    from shared import deployment_views

    async def read(bus: Any) -> Any:
        found = await find(bus, reference)
        return found, await deployment_views.find_progress(bus, found)

    found, progress = with_bus(context, read)
    if as_json:
        _print_json(deployment_views.detail(found, progress))
        return
    print(headline(found))
    if progress is not None and progress.waits_for:
        print(f"waits for {progress.waits_for}")
    for event in found.events:
        print(f"{tuning.utc(event.at)} {event.state} {event.pct:g}%: {event.reason}")
        for finding in event.evidence:
            print(f"    {finding_line(finding)}")


@app.command()
def watch(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """Look on until it ends: weights, workers, gates, events. Status 1 if it is not promoted."""
    _watch(context, reference, as_json)


@app.command()
def pause(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """Keep the weights as they are; the gates go on."""
    _command(context, reference, "pause", as_json)


@app.command()
def resume(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """Go on after a pause."""
    _command(context, reference, "resume", as_json)


@app.command()
def promote(context: typer.Context, reference: Reference, as_json: Json = False) -> None:
    """Go on to the end without soak, bake and gates, as fast as workers are there."""
    _command(context, reference, "promote", as_json)


async def find(bus: Any, reference: str, what: Command | None = None) -> Deployment:
    """The deployment of that id; else the model's that goes on; else, to roll back, its last promoted one, or, to look at,
    its last one. Raises DeploymentNotFound."""
    from shared import deployments
    from shared.errors import DeploymentNotFound

    if (known := await deployments.find(bus, reference)) is not None:
        return known[0]
    found = await deployments.list_deployments(bus, reference)
    chosen = [each for each in found if not each.ended]
    if not chosen and what in (None, "rollback"):
        chosen = [each for each in found if what is None or each.state == "promoted"]
    if not chosen:
        lacks = {None: "of this model", "rollback": "of this model to roll back"}.get(
            what, "of this model that goes on"
        )
        raise DeploymentNotFound(f"{reference} is no deployment, and there is none {lacks}")
    return chosen[-1]


def _command(context: typer.Context, reference: str, what: Command, as_json: bool) -> None:
    from shared import audit, deployment_views, deployments

    async def work(bus: Any) -> tuple[Deployment, Deployment]:
        before = await find(bus, reference, what)
        async with audit.command(bus, audit.cli_actor(), before, what):
            return before, await deployments.command(bus, before.id, what)

    before, after = with_bus(context, work)
    if as_json:
        _print_json(deployment_views.entry(after))
    elif before.serial == after.serial:
        print(f"{after.id} of {after.model}@{after.version} is {after.state} already: {after.reason}")
    elif what == "rollback":
        print(f"{after.id}: {after.model} goes to {after.stable} again, nothing new to {after.version}")
    else:
        print(headline(after))


def _watch(context: typer.Context, reference: str, as_json: bool) -> None:
    from headrace.rollout_view import follow

    known: list[str] = []

    async def work(bus: Any) -> Deployment:
        known.append((await find(bus, reference)).id)
        return await follow(bus, known[0], as_json)

    try:
        ended = with_bus(context, work)
    except KeyboardInterrupt:
        if known:
            print(
                f"{known[0]} goes on without you: `headrace deployments watch {known[0]}` looks on again, "
                f"`headrace rollback {known[0]}` takes it back",
                file=sys.stderr,
            )
        raise typer.Exit(INTERRUPTED) from None
    if ended.state != "promoted":
        raise typer.Exit(1)


def headline(deployment: Deployment) -> str:
    """One line: what is moved where, and how far it is."""
    at = f", step {deployment.step + 1} of {len(deployment.steps)}" if deployment.phase == "stepping" else ""
    return (
        f"{deployment.id}: {deployment.model}@{deployment.version} over {deployment.stable} by {deployment.strategy}: "
        f"{deployment.state}{at}, {deployment.basis_points / 100:g}% of the traffic"
    )


def finding_line(finding: Finding) -> str:
    """What a gate saw, in a line."""
    stable = f", stable {amount(finding.gate, finding.stable)}" if finding.stable is not None else ""
    count = f"{finding.samples} and {finding.stable_samples}" if finding.stable_samples else f"{finding.samples}"
    return (
        f"{finding.gate} {'over' if finding.breached else 'within'} its limit of {amount(finding.gate, finding.limit)}: "
        f"{amount(finding.gate, finding.canary)}{stable}, of {count} requests in the {finding.window}"
    )


def amount(gate: str, value: float | None) -> str:
    """A gate's number with its unit."""
    if value is None:
        return "-"
    return f"{value * 100:.4g}%" if gate.endswith("rate") else f"{value:.4g} ms"


def _strategy(name: str) -> Strategy:
    for known in get_args(Strategy):
        if name == known:
            found: Strategy = known
            return found
    raise typer.BadParameter(f"{name!r} is none of {STRATEGIES}", param_hint="--strategy")


def steps_of(
    strategy: Strategy, shares: str | None, soak_seconds: float | None, requests_min: int | None
) -> tuple[Step, ...] | None:
    """The steps that the options ask for, None: those of the strategy."""
    if shares is None and soak_seconds is None and requests_min is None:
        return None
    steps = DEFAULT_STEPS[strategy]
    if shares is not None:
        usual = steps[0]
        try:
            steps = tuple(msgspec.convert({"pct": each}, Step, strict=False) for each in shares.split(","))
        except msgspec.ValidationError as error:
            raise typer.BadParameter(f"{error}; it is like 1,5,25,100", param_hint="--steps") from None
        steps = tuple(replace(usual, pct=step.pct) for step in steps)
    given = {"soak_seconds": soak_seconds, "requests_min": requests_min}
    changes = {name: value for name, value in given.items() if value is not None}
    return tuple(replace(step, **changes) for step in steps)


def gates_of(settings: list[str]) -> Gates:
    """The usual gates with changes such as `error_rate.max=0.02`, `crashes_max=0` or `tpot_p99=off`."""
    gates: dict[str, Any] = msgspec.to_builtins(Gates())
    for setting in settings:
        name, value = tuning.pair(setting, "--gate")
        gate, dot, field = name.partition(".")
        wanted = None if value == "off" else value
        if gate not in gates or (dot and not isinstance(gates[gate], dict)):
            raise typer.BadParameter(f"{name} is no gate that is on: there are {', '.join(gates)}", param_hint="--gate")
        if dot:
            gates[gate][field] = wanted
        else:
            gates[gate] = wanted
    try:
        return msgspec.convert(gates, Gates, strict=False)
    except msgspec.ValidationError as error:
        place, problem = refusals.read(str(error), Gates)
        raise typer.BadParameter(f"{place}: {problem}", param_hint="--gate") from None


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
