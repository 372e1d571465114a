"""The `headrace` command. Every command imports what it needs when it runs, so that the others start at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace import audit, batches, deployments, dlq, jobs, models, nats_config, routes, tenants, usage
from headrace.globals import API_KEY, Globals, hide_key
from headrace.stack.state import StackError
from shared.errors import HeadraceError
from shared.settings import SettingsError

app = typer.Typer(
    help="Headrace serves language models over a durable queue.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models.app, name="models")
app.command()(deployments.deploy)
app.command()(deployments.rollback)
app.add_typer(deployments.app, name="deployments")
app.add_typer(routes.app, name="routes")
app.add_typer(dlq.app, name="dlq")
app.add_typer(jobs.app, name="jobs")
app.add_typer(batches.app, name="batch")
app.add_typer(tenants.app, name="tenants")
app.command()(audit.audit)
app.command()(usage.usage)
app.command()(nats_config.nats_config)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
Scenario = Annotated[Path, typer.Argument(metavar="SCENARIO.toml", exists=True, dir_okay=False)]
Seed = Annotated[int | None, typer.Option(help="Instead of the scenario's.")]
Seconds = Annotated[float | None, typer.Option(min=1, help="Measured after the warm-up; instead of the scenario's.")]
SameBytes = Annotated[bool, typer.Option("--json", help="Print JSON: the same bytes for the same seed.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and end.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", envvar="HEADRACE_DATA", help="The data directory (default .headrace).")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="An ingress, instead of the local stack's.")] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar=API_KEY, help="An API key, for commands that go to an ingress."),
    ] = None,
) -> None:
    context.obj = Globals(data, url, key)


@app.command()
def up(
    context: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background once it is ready.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of HTTP (default 8000; 0: any free one).")] = None,
    demo: Annotated[bool, typer.Option("--demo/--no-demo", help="Register the demo model on first use.")] = True,
    report_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start the local stack: NATS, an object store, Valkey, an ingress and a controller. Workers start with a request."""
    from headrace import up as stack

    data = _globals(context).local_settings().data_path
    if report_fd is not None:
        stack.reporting(data, port, demo, report_fd)
    elif detach:
        stack.background(data, port, demo)
    else:
        stack.foreground(data, port, demo)


@app.command()
def down(context: typer.Context) -> None:
    """End the local stack."""
    from headrace import up as stack

    stack.down(_globals(context).data_path(), _globals(context).drain_budget_s())


@app.command()
def status(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """What runs, what waits, what is registered, on the stack of --data."""
    from headrace import status as view

    view.show(_globals(context), as_json)


@app.command()
def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="MODEL, MODEL@VERSION or MODEL@ALIAS.")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this one thing and end.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="What the model is told before.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: always the likeliest token.")] = 0.0,
) -> None:
    """Talk to a model in the terminal; what is piped in is asked as one message."""
    from headrace.chat import chat as talk

    hint = "--message"
    if message is None and not sys.stdin.isatty():
        message, hint = sys.stdin.read(), "standard input"
    if message is not None and not message.strip():
        raise typer.BadParameter("there is nothing in it to answer", param_hint=hint)
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    talk(_globals(context), model, message, system, sampling)


@app.command()
def simulate(
    scenario: Scenario,
    seed: Seed = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Instead of the scenario's.")] = None,
    seconds: Seconds = None,
    times: Annotated[float, typer.Option(min=0.001, help="So many times the fleet and the traffic.")] = 1.0,
    as_json: SameBytes = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a page of plots.")] = None,
) -> None:
    """Would this fleet hold its SLA? The production's policies on simulated GPUs; status 1 if it would not."""
    from headrace import simulate as view

    view.show_simulation(scenario, seed, workers, seconds, times, as_json, plot)


@app.command()
def plan(scenario: Scenario, seed: Seed = None, seconds: Seconds = None, as_json: SameBytes = False) -> None:
    """The smallest fleet that holds a scenario's SLA, by simulation, beside what arithmetic says."""
    from headrace import simulate as view

    view.show_plan(scenario, seed, seconds, as_json)


@bench.command()
def profile(
    source: Annotated[str, typer.Argument(metavar="DIRECTORY|sim:PROFILE", help="A model's files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.json")] = Path("profile.json"),
    streams: Annotated[str, typer.Option(help="Closed loops of so many streams.")] = "1,4,16",
    seconds: Annotated[float, typer.Option(min=1, help="Of each.")] = 10.0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens.")] = 120,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    threads: Annotated[int, typer.Option(min=0, help="Of the CPU; 0: the cores that are free to use.")] = 0,
) -> None:
    """Measure an engine's steps and fit their cost: a profile that `headrace simulate` takes."""
    from headrace.bench import measure_profile

    try:
        counts = [int(each) for each in streams.split(",")]
    except ValueError as error:
        raise typer.BadParameter("numbers with commas between them", param_hint="--streams") from error
    measure_profile(source, output, counts, seconds, prompt, tokens, threads)


@app.command()
def ingress(context: typer.Context) -> None:
    """Run one ingress process."""
    from ingress.main import main as run

    run(_globals(context).local_settings())


@app.command()
def controller(context: typer.Context) -> None:
    """Run one controller process."""
    from controller.main import main as run

    run(_globals(context).local_settings())


@app.command()
def worker(
    context: typer.Context,
    worker_id: Annotated[str, typer.Option()],
    model: Annotated[str | None, typer.Option(help="With --version: serve it at once.")] = None,
    version: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Run one worker process; usually the controller starts it. Without a model it waits until it is assigned one."""
    from shared.wire import Assign
    from workers.main import main as run

    if (model is None) != (version is None):
        raise typer.BadParameter("--model and --version go together")
    wanted = None if model is None or version is None else Assign(model, version, True, 0)
    sys.exit(run(_globals(context).local_settings(), worker_id, wanted))


@app.command(hidden=True)
def demo(context: typer.Context, report_fd: Annotated[int | None, typer.Option(hidden=True)] = None) -> None:
    """Register the demo model, in a process of its own so that the supervisor stays small."""
    from headrace.demo import register
    from headrace.stack import reports
    from shared import lifeline

    settings = _globals(context).local_settings()
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    send = reports.sender(report_fd) if report_fd is not None else None
    register(settings, lambda line: send(reports.Progress(line)) if send else print(line))


@app.command(hidden=True)
def check_nats(context: typer.Context, report_fd: Annotated[int | None, typer.Option(hidden=True)] = None) -> None:
    """Try whether the NATS of the settings can be used, in a process of its own so that the supervisor stays small."""
    from headrace.check_nats import check
    from headrace.stack import reports
    from shared import lifeline

    settings = _globals(context).local_settings()
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    try:
        check(settings)
    except (HeadraceError, SettingsError) as error:
        if report_fd is not None:
            reports.sender(report_fd)(reports.Failed(str(error)))
        raise


@app.command(hidden=True)
def server(context: typer.Context, name: Annotated[str, typer.Argument(metavar="nats|objects|redis")]) -> None:
    """Become one of the stack's servers, where the settings say: the Procfile's lines for other runners."""
    from headrace.stack.servers import become

    try:
        become(name, _globals(context).local_settings())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    """Run the command line; exit status 0 done, 1 failed, 2 usage."""
    hide_key()
    try:
        app()
    except (HeadraceError, StackError, SettingsError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)


def _globals(context: typer.Context) -> Globals:
    found: Globals = context.obj
    return found
