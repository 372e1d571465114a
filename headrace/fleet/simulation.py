"""A scenario, run: requests come through router and admission, are queued, claimed and served; faults happen."""

import gc
import random
from collections.abc import Callable, Iterator
from itertools import islice

from headrace.fleet import profiles
from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.control import Control, Decide
from headrace.fleet.report import Records, Result, Sample, summarise
from headrace.fleet.scenario import Fault, Scenario
from headrace.fleet.worker import Fleet, Worker
from headrace.fleet.workload import Request, Source
from ingress.admission import Admission
from shared.errors import HeadraceError
from shared.records import Route, Version, Weight
from shared.router import Router
from workers.engine.blocks import BLOCK_TOKENS

MODEL, VERSION = "model", "v1"
SAMPLES = 240  # of the fleet, over the measured time
TAIL_S = 600.0  # how long the last requests may take after the traffic has ended
SLICE_S = 0.5  # of virtual time, between two looks at whether all is done

OnProgress = Callable[[float], None]  # the share of the virtual time that is over


class Simulation:
    """One run of a scenario. `skips`: runs of equal decode steps are taken at once; the result is the same without."""

    def __init__(self, scenario: Scenario, skips: bool = True, decide: Decide | None = None) -> None:
        """`decide`: another autoscaler, to compare the production's with. Raises BadRequest."""
        self.scenario = scenario
        self._clock = Clock()
        self._broker = Broker(self._clock)
        self._dice = random.Random(f"{scenario.seed} fleet")
        profile, engine = scenario.profile(), scenario.engine
        slots, blocks = engine.slots or profile.slots, engine.kv_blocks or profile.blocks
        self._fleet = Fleet(
            clock=self._clock,
            broker=self._broker,
            listener=self,
            profile=profile,
            engine=engine,
            settings=scenario.settings,
            cost=profiles.probed_cost(profile, slots, blocks, engine.prefill_chunk),
            slots=slots,
            blocks=blocks,
            length_max=min(engine.max_model_len or profiles.MAX_MODEL_LEN, blocks * BLOCK_TOKENS),
            dice=self._dice,
            jitter=scenario.fleet.jitter,
            skips=skips,
        )
        self._starts, self._ends = scenario.warmup_s, scenario.warmup_s + scenario.seconds
        self._sources = [
            Source(traffic, place, scenario.seed, self._starts, self._ends)
            for place, traffic in enumerate(scenario.traffic)
        ]
        self._router = Router()
        self._router.put_version(Version(model=MODEL, version=VERSION, state="available", source="sim"))
        self._router.put_route(Route(MODEL, {}, [Weight(VERSION, 10_000)]))
        self._queued: dict[str, int] = {}
        self._admission = Admission(scenario.settings, self)
        self._records = Records(self._starts, self._ends)
        self._samples: list[Sample] = []
        self._workers_made = 0
        self._worker_hours_s = 0.0
        self._open = 0  # requests that will still end
        self.workers: dict[str, Worker] = {}
        self._decide = decide
        self._control: Control | None = None

    def run(self, on_progress: OnProgress = lambda share: None) -> Result:
        """To the end of the last request that is measured."""
        clock, fleet = self._clock, self.scenario.fleet
        for _ in range(fleet.workers):
            self.start_worker(warm=True)
        if fleet.autoscale:
            self._control = Control(
                clock, self._broker, self, self.scenario, fleet.min_workers, fleet.max_workers, self._decide
            )
        for source in self._sources:
            self._next(source.open())
            for stream in range(source.traffic.streams if source.traffic.kind == "closed" else 0):
                self._think((source, stream))
        for fault in self.scenario.faults:
            clock.at(self._starts + fault.at_s, self._strike, fault)
        clock.at(self._starts, self._sample)
        collects = gc.isenabled()
        gc.disable()  # nothing in here is a cycle that matters, and looking for them takes a third of the time
        try:
            self._run_to_the_end(on_progress)
        finally:
            if collects:
                gc.enable()
        return summarise(self.scenario, self._fleet, self._records, self._samples, self._control)

    def _run_to_the_end(self, on_progress: OnProgress) -> None:
        clock = self._clock
        while clock.now < self._ends or (self._records.open and clock.now < self._ends + TAIL_S):
            clock.run(clock.now + SLICE_S)
            on_progress(min(1.0, clock.now / self._ends))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next(self, requests: Iterator[Request]) -> None:
        for request in islice(requests, 1):
            self._clock.at(request.at, self._comes, (request, requests))

    def _comes(self, what: tuple[Request, Iterator[Request]]) -> None:
        request, others = what
        self._submit(request)
        self._next(others)

    def _think(self, stream: tuple[Source, int]) -> None:
        if self._clock.now < self._ends:
            self._submit(stream[0].closed(stream[1], self._clock.now))

    def _submit(self, request: Request) -> None:
        now, tenant = self._clock.now, request.tenant
        request.number = self._records.new(request)
        try:
            self._router.resolve(MODEL, None, tenant)
            self._admission.check_queue(tenant, 1, now)
        except HeadraceError as error:
            self.refused(request, error.code)
            return
        self._queued[tenant] = self._queued.get(tenant, 0) + 1
        if request.given_up_at < float("inf"):
            self._clock.at(request.given_up_at, self._cancel, request)
        self._broker.publish(request)

    def queued(self, tenant: str) -> int:
        """As the admission asks for it: published, and not accepted."""
        return self._queued.get(tenant, 0)

    def _cancel(self, request: Request) -> None:
        if request.done >= 0 or request.refused:
            return
        self._records.cancelled(request)
        if self._broker.withdraw(request):
            self._unqueue(request)
        else:
            any(worker.cancel(request) for worker in self.workers.values() if worker.slots)

    def _unqueue(self, request: Request) -> None:
        self._queued[request.tenant] -= 1

    def accepted(self, request: Request) -> None:
        self._unqueue(request)

    def finished(self, request: Request) -> None:
        self._records.finished(request)
        self._go_on(request)

    def refused(self, request: Request, reason: str) -> None:
        self._records.refused(request, reason)
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        if request.stream >= 0:
            source = self._sources[request.source]
            pause_s = source.traffic.think_s + self.scenario.fleet.path_ms / 1e3
            self._clock.at(self._clock.now + pause_s, self._think, (source, request.stream))

    # -- workers -----------------------------------------------------------------------------------------------------

    def start_worker(self, warm: bool = False) -> None:
        """Start one; `warm`: it is loaded already."""
        self._workers_made += 1
        worker = Worker(self._workers_made, self._fleet, self._clock.now)
        self.workers[worker.name] = worker
        if warm:
            worker.begin()
        else:
            self._clock.at(self._clock.now + self._fleet.profile.start_s, worker.begin)

    def gone(self, worker: Worker) -> None:
        """A worker is not there any more."""
        del self.workers[worker.name]
        self._records.worker_s += max(0.0, min(worker.ended, self._ends) - max(worker.started, self._starts))

    # -- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        later = self._clock.now + fault.seconds
        if fault.kind == "broker_pause":
            self._broker.paused = True
            self._clock.at(later, lambda _: self._broker.resume())
        elif fault.kind in ("dead_controller", "dead_metrics"):
            if self._control is not None:
                self._control.suffer(fault.kind, later)
        else:
            present = [each for each in self.workers.values() if each.state == "active"]
            count = round(fault.share * len(present)) if fault.share else fault.count
            for worker in self._dice.sample(present, min(count, len(present))):
                if fault.kind == "gpu_loss":
                    worker.lose(self.scenario.settings.silence_s)
                elif fault.kind == "dead_worker":
                    worker.lose(fault.seconds)
                else:
                    worker.slow(fault.times)
                    self._clock.at(later, _recover, worker)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _sample(self, _: object) -> None:
        now = self._clock.now
        if now >= self._ends:
            for worker in self.workers.values():
                self._records.worker_s += max(0.0, self._ends - max(worker.started, self._starts))
            return
        states: dict[str, int] = {}
        for worker in self.workers.values():
            states[worker.state] = states.get(worker.state, 0) + 1
        self._samples.append(
            Sample(
                at_s=round(now - self._starts, 3),
                workers=states,
                queued=self._broker.pending,
                claimed=self._broker.claimed,
            )
        )
        self._clock.at(min(self._ends, now + self.scenario.seconds / SAMPLES), self._sample)


def _recover(worker: Worker) -> None:
    worker.slow(1.0)


def simulate(scenario: Scenario, on_progress: OnProgress = lambda share: None) -> Result:
    """Raises BadRequest."""
    return Simulation(scenario).run(on_progress)
