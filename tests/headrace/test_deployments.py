"""`headrace deploy`, `rollback`, `deployments`: what is asked for, what is told, and the view that looks on."""

import asyncio
import contextlib
import io
import json
import os
import pty
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from headrace import rollout_view, status
from headrace.cli import app
from headrace.deployments import finding_line, gates_of, steps_of
from headrace.rollout_view import Scene
from shared import deployments, records, registry, rollouts, subjects
from shared.bus import Bus
from shared.records import ALL_TRAFFIC, Lease, Route, Version, Weight
from shared.rollouts import DEFAULT_STEPS, Deployment, Finding, Gates, NewDeployment, Progress, VersionProgress, noted
from shared.settings import Settings

FINDING = Finding(
    gate="error_rate",
    breached=True,
    canary=0.21,
    limit=0.013,
    samples=57,
    window="step",
    stable=0.001,
    stable_samples=4000,
)
TTFT = Finding(gate="ttft_p99", breached=False, canary=81.5, limit=180.0, samples=57, window="deployment")


@pytest.fixture
def on_bus(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Bus], Awaitable[Any]]], Any]:
    """Runs work on a bus of the server that the commands reach too."""
    monkeypatch.setenv("HEADRACE_NATS_URL", nats_url)

    def run(work: Callable[[Bus], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            bus = await Bus.connect(Settings(nats_url=nats_url), "test")
            try:
                await bus.ensure()
                return await work(bus)
            finally:
                await bus.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def model(on_bus: Any) -> str:
    """A model with v1, which has the traffic, and v2."""
    name = f"r-{secrets.token_hex(4)}"

    async def prepare(bus: Bus) -> None:
        for version in ("v1", "v2"):
            await registry.register(bus, Version(model=name, version=version, state="available", source="sim:zero"))

    on_bus(prepare)
    return name


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def shown(*arguments: str) -> Any:
    """What a command prints as JSON."""
    ran = command(*arguments, "--json")
    assert ran.exit_code == 0, f"{ran.output}{ran.exception}"
    return json.loads(ran.output)


async def move(bus: Bus, id_: str, *states: str, **fields: Any) -> None:
    """What the controller does: another state, and the route that follows."""
    for state in states:
        found = await deployments.find(bus, id_)
        assert found is not None
        changed = noted(found[0], state, f"now {state}", 2e9, **fields)  # type: ignore[arg-type]
        assert await deployments.write(bus, changed, found[1])
        await deployments.apply_route(bus, changed)


def test_steps_are_those_of_the_strategy_unless_told_otherwise() -> None:
    assert steps_of("canary", None, None, None) is None
    given = steps_of("canary", "2.5,100", None, None)
    assert given is not None
    assert [(step.pct, step.soak_seconds, step.requests_min) for step in given] == [(2.5, 60, 100), (100, 60, 100)]
    slower = steps_of("ramp", None, 5.0, 0)
    assert slower == tuple(replace(step, soak_seconds=5.0, requests_min=0) for step in DEFAULT_STEPS["ramp"])
    for wrong in ("", "5,x", "0,100", "5,101"):
        with pytest.raises(typer.BadParameter):
            steps_of("canary", wrong, None, None)


def test_gates_keep_what_is_not_changed() -> None:
    assert gates_of([]) == Gates()
    found = gates_of(
        ["refusal_rate.max=0.1", "ttft_p99.ratio_max=off", "tpot_p99=off", "crashes_max=0", "samples_min=7"]
    )
    assert found.refusal_rate == replace(Gates().refusal_rate, max=0.1)  # type: ignore[type-var]
    assert found.ttft_p99 == replace(Gates().ttft_p99, ratio_max=None)  # type: ignore[type-var]
    assert (found.tpot_p99, found.crashes_max, found.samples_min) == (None, 0, 7)
    for wrong in (
        "error_rate",
        "error_rate.max=2",
        "error_rate.colour=1",
        "speed=1",
        "samples_min.max=1",
        "samples_min=off",
    ):
        with pytest.raises(typer.BadParameter):
            gates_of([wrong])


def test_a_finding_is_a_line_with_its_numbers() -> None:
    assert finding_line(FINDING) == (
        "error_rate over its limit of 1.3%: 21%, stable 0.1%, of 57 and 4000 requests in the step"
    )
    assert finding_line(TTFT) == "ttft_p99 within its limit of 180 ms: 81.5 ms, of 57 requests in the deployment"


def test_a_rollout_is_begun_told_what_to_do_and_taken_back(on_bus: Any, model: str) -> None:
    options = ["--steps", "5,100", "--soak", "1", "--requests-min", "2", "--bake", "3", "--gate", "error_rate.max=0.02"]
    made = shown("deploy", f"{model}@v2", *options)
    id_ = made["deployment_id"]
    assert made | {"model": model, "version": "v2", "stable": "v1", "state": "pending", "step": 0} == made
    whole = shown("deployments", "show", id_)
    assert whole["steps"] == [{"pct": pct, "soak_seconds": 1.0, "requests_min": 2} for pct in (5.0, 100.0)]
    assert (whole["bake_seconds"], whole["gates"]["error_rate"]["max"]) == (3.0, 0.02)
    again = command("deploy", f"{model}@v2")
    assert (again.exit_code, getattr(again.exception, "code", None)) == (1, "deployment_active")

    on_bus(lambda bus: move(bus, id_, "stepping", step=0))
    assert (
        f"{id_}: {model}@v2 over v1 by canary: paused, step 1 of 2, 5% of the traffic"
        in command("deployments", "pause", model).output
    )
    assert f"{id_} of {model}@v2 is paused already: by hand" in command("deployments", "pause", id_).output
    assert shown("deployments", "resume", id_)["state"] == "stepping"
    assert "step 1 of 2" in command("deployments", "promote", model).output
    taken = command("rollback", model)
    assert (taken.exit_code, taken.output) == (0, f"{id_}: {model} goes to v1 again, nothing new to v2\n")
    assert on_bus(lambda bus: registry.find_route(bus, model)).weights == [Weight("v1", ALL_TRAFFIC)]
    on_bus(lambda bus: move(bus, id_, "rolled_back", evidence=[FINDING]))

    text = command("deployments", "show", model).output
    assert f"2033-05-18 03:33:20Z rolled_back 0%: now rolled_back\n    {finding_line(FINDING)}\n" in text
    rows = [line.split() for line in command("deployments", "list", "--model", model).output.splitlines()]
    assert rows[1][:7] == [id_, f"{model}@v2", "v1", "canary", "rolled_back", "1/2", "0%"]
    assert f"{id_} was rolled back" in command("models", "show", model).output
    for arguments in (["rollback", model], ["deployments", "pause", model], ["rollback", "d-999999"]):
        nothing = command(*arguments)
        assert (nothing.exit_code, getattr(nothing.exception, "code", None)) == (1, "deployment_not_found")
    assert str(command("rollback", model).exception).endswith("there is none of this model to roll back")


def test_a_webhook_is_told_and_its_secret_is_not_on_the_command_line(
    on_bus: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "whsec_" + "A" * 40
    monkeypatch.setenv("HEADRACE_WEBHOOK_SECRET", secret)
    made = shown("deploy", f"{model}@v2", "--webhook", "https://hooks.example.com/x")
    found, _ = on_bus(lambda bus: deployments.find(bus, made["deployment_id"]))
    assert (found.webhook.url, found.webhook.secret) == ("https://hooks.example.com/x", secret)
    assert secret not in command("deployments", "show", model, "--json").output
    refused = command("deploy", f"{model}@v2", "--webhook", "http://10.0.0.1/")
    assert (refused.exit_code, getattr(refused.exception, "param", None)) == (1, "webhook.url")


def test_without_one_that_goes_on_the_last_promoted_one_is_rolled_back(on_bus: Any, model: str) -> None:
    id_ = shown("deploy", f"{model}@v2", "--strategy", "immediate")["deployment_id"]
    on_bus(lambda bus: move(bus, id_, "promoted"))
    assert on_bus(lambda bus: registry.find_route(bus, model)).weights == [Weight("v2", ALL_TRAFFIC)]
    assert f"{model} goes to v1 again" in command("rollback", model).output
    assert on_bus(lambda bus: registry.find_route(bus, model)).weights == [Weight("v1", ALL_TRAFFIC)]


def test_what_makes_no_sense_is_a_usage_error(model: str) -> None:
    for options in (["--strategy", "hope"], ["--steps", "x"], ["--gate", "speed=1"], ["--gate", "error_rate"]):
        assert command("deploy", f"{model}@v2", *options).exit_code == 2, options
    assert command("deploy", model).exit_code == 2
    refused = command("deploy", f"{model}@v2", "--strategy", "blue_green", "--steps", "5,100")
    assert (refused.exit_code, getattr(refused.exception, "param", None)) == (1, "steps")


def test_status_has_a_line_for_each_that_goes_on(on_bus: Any, model: str, nats_url: str) -> None:
    id_ = shown("deploy", f"{model}@v2")["deployment_id"]
    told = _progress(id_, waits_for="rain")

    async def tell(bus: Bus) -> None:
        await move(bus, id_, "stepping", step=1)
        await bus.kv_put(subjects.ROLLOUTS_BUCKET, subjects.key(id_), rollouts.encode(told))

    def line() -> str:
        found = asyncio.run(status.collect(Settings(nats_url=nats_url), None))
        return next((status.rollout_line(each) for each in found.rollouts if each.deployment_id == id_), "")

    assert line().endswith(": pending, 0%; no controller tells what it waits for")
    on_bus(tell)
    assert line() == f"rollout {id_}: {model}@v2 over v1: stepping, step 2 of 4, 5%; waits for rain"
    assert line() in command("status").output
    on_bus(lambda bus: move(bus, id_, "failed"))
    assert line() == ""


# -- the view ----------------------------------------------------------------------------------------------------------


def _progress(id_: str, waits_for: str) -> Progress:
    canary, stable = (VersionProgress(active=active, needed=needed, ended=57) for active, needed in ((1, 2), (3, 3)))
    return Progress(deployment=id_, at=0.0, waits_for=waits_for, canary=canary, stable=stable, findings=[FINDING, TTFT])


def _rendered(scene: Scene) -> str:
    terminal = Console(width=120, file=io.StringIO())
    with terminal.capture() as drawn:
        terminal.print(rollout_view.render(scene))
    return drawn.get()


def _deployment(id_: str = "d-7") -> Deployment:
    made = rollouts.plan_of(NewDeployment(model="m", version="v2"), id_, "v1", 1e9)
    return noted(made, "stepping", "2 workers serve", 1e9 + 5, step=1)


def test_the_picture_has_weights_workers_gates_and_what_is_waited_for() -> None:
    scene = Scene("d-7", ttl_s=60.0)
    scene.on_deployment("d-7", rollouts.encode(_deployment()))
    assert "no controller tells what it waits for" in _rendered(scene)
    scene.on_deployment("d-8", rollouts.encode(_deployment("d-8")))  # another one plays no part
    route = Route(model="m", aliases={}, weights=[Weight("v1", 9500), Weight("v2", 500)])
    scene.on_route("m", records.encode(route))
    scene.on_progress("d-7", rollouts.encode(_progress("d-7", "48 s of soaking")))
    for number, state in enumerate(("active", "starting", "starting")):
        lease = Lease(worker=f"w{number}", model="m", version="v2", state=state, pid=1, host="h", started=0.0)
        scene.on_lease(f"w{number}", records.encode(lease))
    assert [line.split() for line in _rendered(scene).splitlines()] == [
        "d-7: m@v2 over v1 by canary: stepping, step 2 of 4, 5% of the traffic".split(),
        "waits for 48 s of soaking".split(),
        "version traffic requests in the step serve needed workers".split(),
        "m@v2 5% 57 1 2 1 active, 2 starting".split(),
        "m@v1 95% 57 3 3 none".split(),
        "gate since canary limit stable requests".split(),
        "error_rate step 21% 1.3% 0.1% 57 / 4000 breached".split(),
        "ttft_p99 deployment 81.5 ms 180 ms - 57 / 0 holds".split(),
    ]
    scene.on_lease("w1", None)
    assert "1 active, 1 starting" in _rendered(scene)


def test_what_is_not_renewed_is_not_shown() -> None:
    scene = Scene("d-7", ttl_s=-1.0)
    scene.on_deployment("d-7", rollouts.encode(_deployment()))
    scene.on_progress("d-7", rollouts.encode(_progress("d-7", "rain")))
    lease = Lease(worker="w", model="m", version="v2", state="active", pid=1, host="h", started=0.0)
    scene.on_lease("w", records.encode(lease))
    assert scene.workers("m", "v2") == "none"
    assert "no controller tells" in _rendered(scene)


def test_events_are_told_once_even_when_the_oldest_are_not_kept() -> None:
    deployment = _deployment()
    assert [event.state for event in rollout_view.events_after(deployment, 0)] == ["pending", "stepping"]
    assert [event.state for event in rollout_view.events_after(deployment, 1)] == ["stepping"]
    assert rollout_view.events_after(deployment, 2) == []
    short = replace(deployment, serial=500)
    assert rollout_view.events_after(short, 0) == short.events


@contextlib.contextmanager
def _headrace(*arguments: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    # whoever runs the tests in the background may have them ignore SIGINT, and what they start as well
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen([sys.executable, "-m", "headrace", *arguments], **how)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def test_where_no_terminal_is_each_event_is_a_line_as_it_comes(on_bus: Any, model: str) -> None:
    with _headrace("deploy", f"{model}@v2", "--watch", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        created = process.stdout.readline().decode().split(maxsplit=2)[2]
        id_ = created.split()[0]
        assert created == f"{id_} pending 0%: created\n"
        for state, pct in (("warming", 0), ("stepping", 1)):
            on_bus(lambda bus, state=state: move(bus, id_, state, step=0))
            line = process.stdout.readline().decode()
            assert line == f"2033-05-18 03:33:20Z {id_} {state} {pct}%: now {state}\n"
        on_bus(lambda bus: move(bus, id_, "rolling_back", "rolled_back"))
        rest = process.stdout.read().decode()
        assert [line.split()[3] for line in rest.splitlines()] == ["rolling_back", "rolled_back"]
        assert process.wait(10) == 1


def test_where_no_terminal_is_a_quiet_rollout_says_once_what_it_waits_for(
    on_bus: Any, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_view, "QUIET_S", 0.1)
    lacks = "requests from 1% of the traffic: 0 of 100 have ended"

    async def watch(bus: Bus, as_json: bool) -> list[str]:
        made = await deployments.create(bus, NewDeployment(model=model, version="v2"))
        await move(bus, made.id, "stepping", step=0)
        told = rollouts.encode(_progress(made.id, lacks))
        await bus.kv_put(subjects.ROLLOUTS_BUCKET, subjects.key(made.id), told)
        watching = asyncio.create_task(rollout_view.follow(bus, made.id, as_json))
        await asyncio.sleep(2.5)
        await move(bus, made.id, "failed")
        await watching
        return capsys.readouterr().out.splitlines()

    lines = on_bus(lambda bus: watch(bus, as_json=False))
    assert [line.split(maxsplit=3)[3] for line in lines] == [
        "pending 0%: created",
        "stepping 1%: now stepping",
        f"stepping 1%: waits for {lacks}",
        "failed 0%: now failed",
    ]
    assert len(on_bus(lambda bus: watch(bus, as_json=True))) == 3  # events alone


def test_a_promotion_ends_it_well_and_in_json_if_asked(on_bus: Any, model: str) -> None:
    id_ = shown("deploy", f"{model}@v2")["deployment_id"]
    on_bus(lambda bus: move(bus, id_, "baking", "promoted", evidence=[TTFT]))
    ran = command("deployments", "watch", model, "--json")
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in ran.output.splitlines()]
    assert [(line["deployment_id"], line["state"], line["pct"]) for line in lines] == [
        (id_, "pending", 0),
        (id_, "baking", 100),
        (id_, "promoted", 100),
    ]
    assert lines[2]["evidence"][0]["gate"] == "ttft_p99"
    assert command("deployments", "watch", "nobody").exit_code == 1


def test_ctrl_c_leaves_the_rollout_alone_and_says_so(on_bus: Any, model: str) -> None:
    id_ = shown("deploy", f"{model}@v2")["deployment_id"]
    with _headrace("deployments", "watch", id_, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert (
            process.stderr.read().decode().startswith(f"{id_} goes on without you: `headrace deployments watch {id_}`")
        )
    assert shown("deployments", "show", id_)["state"] == "pending"


def test_on_a_terminal_the_picture_is_drawn_anew(on_bus: Any, model: str) -> None:
    id_ = shown("deploy", f"{model}@v2")["deployment_id"]
    ours, its = pty.openpty()
    drawn: list[str] = []
    changed = threading.Condition()

    def read() -> None:
        with contextlib.suppress(OSError):  # the end, on Linux
            while data := os.read(ours, 4096):
                with changed:
                    drawn.append(data.decode(errors="replace"))
                    changed.notify_all()

    def wait_for(text: str) -> None:
        with changed:
            assert changed.wait_for(lambda: text in "".join(drawn), 15), "".join(drawn)

    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with _headrace("deployments", "watch", id_, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        reader = threading.Thread(target=read)
        reader.start()
        wait_for("no controller tells what it waits for")
        told = rollouts.encode(_progress(id_, "rain"))
        on_bus(lambda bus: bus.kv_put(subjects.ROLLOUTS_BUCKET, subjects.key(id_), told))
        wait_for("waits for rain")
        on_bus(lambda bus: move(bus, id_, "stepping", step=2))
        wait_for("step 3 of 4, 25% of the traffic")
        on_bus(lambda bus: move(bus, id_, "baking", "promoted"))
        assert process.wait(10) == 0
        reader.join(10)
    os.close(ours)
    assert f"{id_} promoted 100%: now promoted" in "".join(drawn)
