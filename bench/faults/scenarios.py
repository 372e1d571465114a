"""The scenarios of `bench/chaos.py`: what is broken, how often, and what clients may then see."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from faults import corpus, schedule
from faults.fleet import Fleet
from faults.load import Load
from faults.processes import processor_seconds, resident_bytes
from faults.report import Report, account, check_books
from faults.schedule import Fault, Injector
from shared import subjects

QUESTIONS = 300
MODEL_QUESTIONS = 20
WARM_S = 120.0  # memory is measured after it
BROKER_WARM_S = (
    420.0  # by then the newest block of each stream, which nats-server has in memory, was once at its largest
)
SAMPLE_S = 1.0
GROWTH_MAX = 0.01  # of resident memory, a minute


class Scenario(msgspec.Struct, kw_only=True):
    """`allowed`: outcomes besides completed and cancelled that the faults excuse."""

    name: str
    kinds: list[str]
    every_s: float = 1.0
    clients: int = 32
    ingresses: int = 2
    nodes: int = 1
    cancel_share: float = 0.0
    plain_share: float = 0.2
    words: tuple[int, int] = corpus.WORDS
    come_back: bool = False  # clients whose connection breaks go on with their request
    allowed: set[str] = set()
    shared_port: bool = False
    proxied: bool = False  # ingresses reach NATS by ways that can be cut
    unrefused: bool = False  # no connection may be refused either
    workers: int = 4
    stopped_s: float = schedule.STOPPED_S
    books: bool = False  # no process dies, so that the counters of ingresses and workers must agree
    settle_s: float = 40.0
    settings: dict[str, Any] = {}
    real: bool = False  # asks the real model


BROKER_CODES = {"failed:bus_unavailable"}

SCENARIOS = {
    each.name: each
    for each in (
        Scenario(name="workers", kinds=["kill_worker"]),
        Scenario(name="drains", kinds=["term_worker"]),
        Scenario(name="ingress", kinds=["kill_ingress"], come_back=True),
        Scenario(name="nats", kinds=["kill_broker"], every_s=2.5, allowed=BROKER_CODES),
        Scenario(name="controller", kinds=["kill_controller", "kill_worker"], every_s=0.75),
        Scenario(name="cluster", kinds=["kill_leader"], every_s=6.0, nodes=3, allowed=BROKER_CODES),
        Scenario(name="stop", kinds=["stop_worker"], every_s=6.0),
        Scenario(name="cut", kinds=["cut_ingress"], every_s=6.0, proxied=True, allowed=BROKER_CODES),
        Scenario(
            name="model",
            kinds=["kill_worker_of_all"],
            every_s=4.0,
            clients=6,
            workers=2,
            settings={"torch_threads": corpus.MODEL_THREADS},
            real=True,
        ),
        Scenario(name="cancels", kinds=[], cancel_share=0.9, plain_share=0.0, clients=64, books=True),
        Scenario(name="load", kinds=[], clients=160, cancel_share=0.1, words=(200, 800), books=True),
        Scenario(
            name="rolling",
            kinds=[
                "replace_ingress",
                "term_worker",
                "term_worker",
                "term_controller",
                "replace_ingress",
                "term_broker",
            ],
            every_s=2.0,
            shared_port=True,
            unrefused=True,
            settings={"drain_budget_s": 10.0},
        ),
        Scenario(
            name="seconds",  # all kinds with short timers, for continuous integration
            kinds=["kill_worker", "kill_ingress", "stop_worker", "kill_broker", "term_worker", "kill_controller"],
            clients=16,
            workers=3,
            cancel_share=0.1,
            come_back=True,
            allowed=BROKER_CODES,
            stopped_s=5.0,
            settings={
                "ack_wait_s": 2.0,
                "in_progress_every_s": 0.5,
                "pull_expires_s": 1.0,
                "orphan_grace_s": 3.0,
                "drain_budget_s": 5.0,
            },
        ),
        Scenario(
            name="mixed",
            kinds=["kill_worker", "stop_worker", "term_worker", "kill_broker", "kill_ingress", "kill_controller"],
            every_s=3.0,
            cancel_share=0.1,
            come_back=True,
            allowed=BROKER_CODES,
        ),
    )
}


async def play(
    scenario: Scenario, seed: int, faults: int, seconds: float, cancels: int = 0, model: Path | None = None
) -> Report:
    """Run a scenario: `faults` of them under load, or `seconds` of load, or until `cancels` clients have left.

    `model` is the directory of a real one, for the scenario that asks it.
    """
    more: dict[str, Any] = {}
    if scenario.real:
        assert model is not None, f"the scenario {scenario.name} needs the directory of a model"
        questions = await corpus.of_model(seed, model, MODEL_QUESTIONS)
        more = {"source": str(model), "engine": corpus.MODEL_ENGINE}
    else:
        questions = await corpus.make(seed, QUESTIONS, scenario.words)
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as directory:
        async with Fleet(
            Path(directory),
            workers=scenario.workers,
            ingresses=scenario.ingresses,
            nodes=scenario.nodes,
            shared_port=scenario.shared_port,
            proxied=scenario.proxied,
            **more,
            **scenario.settings,
        ) as fleet:
            return await _play(fleet, scenario, seed, faults, seconds, cancels, questions)


async def _play(
    fleet: Fleet,
    scenario: Scenario,
    seed: int,
    faults: int,
    seconds: float,
    cancels: int,
    questions: list[corpus.Question],
) -> Report:
    load = Load(
        seed,
        questions,
        fleet.urls,
        scenario.clients,
        scenario.cancel_share,
        scenario.plain_share,
        come_back=scenario.come_back,
    )
    injector = Injector(fleet, scenario.stopped_s)
    memory = Memory(fleet)
    report = Report(scenario=scenario.name, seed=seed, read_all=not scenario.plain_share)
    begin = time.monotonic()
    load.start()
    watching = asyncio.create_task(memory.watch())
    planned: list[Fault] = schedule.make(seed, scenario.kinds, faults, scenario.every_s) if scenario.kinds else []
    try:
        await injector.run(planned)
        if cancels:
            await load.cancelled(cancels)
        else:
            await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        await load.stop()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    report.seconds = time.monotonic() - begin
    held = await fleet.settled(scenario.settle_s)
    dead = (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages
    account(report, load.records, injector.done, held, scenario.allowed, dead)
    if scenario.books:
        report.notes.append(check_books(report, await fleet.ingress_counters(), await fleet.worker_counters()))
    report.notes += memory.notes(report, scenario.books)
    if resumed := sum(record.resumes > 0 for record in load.records):
        report.notes.append(f"{resumed} clients came back")
    if load.refused:
        refused = f"{load.refused} connections were refused (no request: tried again)"
        (report.problems if scenario.unrefused else report.notes).append(refused)
    return report


class Memory:
    """Resident memory of every process over time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._samples: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._begin = time.monotonic()

    async def watch(self) -> None:
        while True:
            now = time.monotonic() - self._begin
            for name, pid in self._fleet.members().items():
                self._samples.setdefault((name, pid), []).append((now, resident_bytes(pid)))
            await asyncio.sleep(SAMPLE_S)

    def notes(self, report: Report, steady: bool) -> list[str]:
        """Growth of each process that was there for a minute after the warm-up; too much of it is a problem.

        It is the slope of the line that fits best, of the mean: a broker's memory is a saw-tooth, of which no two points
        tell anything. `steady`: no process dies, so that nothing has a new state to get used to.
        """
        notes = []
        for (name, pid), samples in sorted(self._samples.items()):
            warm_s = BROKER_WARM_S if name.startswith("nats") else WARM_S
            late = [(at, size) for at, size in samples if at >= warm_s and size]
            if len(late) < 60:
                continue
            line = statistics.linear_regression([at / 60 for at, _ in late], [size for _, size in late])
            share = line.slope / statistics.fmean(size for _, size in late)
            notes.append(
                f"{name}: {late[0][1] >> 20} -> {late[-1][1] >> 20} MiB, at most {max(size for _, size in late) >> 20}, "
                f"{100 * share:+.2f}% a minute, {processor_seconds(pid):.0f} s of CPU"
            )
            if steady and share > GROWTH_MAX:
                report.problems.append(f"the memory of {name} grows by {100 * share:.2f}% a minute")
        return notes


__all__ = ["SCENARIOS", "Scenario", "play"]
