"""A scenario, run: requests come through router and admission, are queued, claimed and served; faults happen."""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from headrace.fleet import profiles
from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.control import MODEL, Control, Decide
from headrace.fleet.ingress import Ingress
from headrace.fleet.pool import Defect, Fleet
from headrace.fleet.profiles import Profile
from headrace.fleet.report import Records, Result, Sample, summarise
from headrace.fleet.rollout import NEW, OLD, Rollout
from headrace.fleet.scenario import Fault, Scenario
from headrace.fleet.worker import Worker
from headrace.fleet.workload import Request, Source
from shared.errors import HeadraceError
from shared.records import ALL_TRAFFIC, Route, Version, Weight
from shared.rollouts import Deployment
from shared.router import Router
from workers.engine.blocks import BLOCK_TOKENS

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
        self._dice = random.Random(f"{scenario.seed} fleet")
        self._starts, self._ends = scenario.warmup_s, scenario.warmup_s + scenario.seconds
        self._sources = [
            Source(traffic, place, scenario.seed, self._starts, self._ends)
            for place, traffic in enumerate(scenario.traffic)
        ]
        self._limits = {tenant: source.limits for source in self._sources for tenant in source.tenants}
        self._fleets = {OLD: self._fleet(OLD, scenario.profile(), Defect(errors=scenario.fleet.errors), skips)}
        if scenario.rollout is not None:
            self._fleets[NEW] = self._fleet(NEW, scenario.new_profile(), _defect(scenario), skips)
        self._router = Router()
        for version in self._fleets:
            self._router.put_version(Version(model=MODEL, version=version, state="available", source="sim"))
        route = Route(MODEL, {}, [Weight(OLD, ALL_TRAFFIC)])
        self._router.put_route(route)
        self._rollout = Rollout(scenario, self._clock, route, self._routed) if scenario.rollout else None
        self._ingresses = [self._ingress(scenario.settings.tenant_burst) for _ in range(scenario.fleet.ingresses)]
        self._direct = self._ingress(0)  # clients that publish for themselves
        self._balancer = random.Random(f"{scenario.seed} ingresses")
        self._records = Records(self._starts, self._ends)
        self._samples: list[Sample] = []
        self._workers_made = 0
        self.workers: dict[str, Worker] = {}
        self._decide = decide
        self._control: Control | None = None

    def _fleet(self, version: str, profile: Profile, defect: Defect, skips: bool) -> Fleet:
        scenario, engine = self.scenario, self.scenario.engine
        slots, blocks = engine.slots or profile.slots, engine.kv_blocks or profile.blocks
        return Fleet(
            version=version,
            clock=self._clock,
            broker=Broker(self._clock, version),
            listener=self,
            profile=profile,
            engine=engine,
            settings=scenario.settings,
            cost=profiles.probed_cost(profile, slots, blocks, engine.prefill_chunk),
            slots=slots,
            blocks=blocks,
            limits=self._limits,
            length_max=min(engine.max_model_len or profiles.MAX_MODEL_LEN, blocks * BLOCK_TOKENS),
            dice=self._dice,
            jitter=scenario.fleet.jitter,
            skips=skips,
            defect=defect,
        )

    def _ingress(self, burst: int) -> Ingress:
        brokers = {version: fleet.broker for version, fleet in self._fleets.items()}
        count = self.scenario.fleet.ingresses
        return Ingress(
            self._clock, self.scenario.settings, brokers, burst, count, lambda tenant: self._limits[tenant].weight
        )

    def run(self, on_progress: OnProgress = lambda share: None) -> Result:
        """To the end of the last request that is measured."""
        clock, fleet = self._clock, self.scenario.fleet
        for _ in range(fleet.workers):
            self.start_worker(OLD, warm=True)
        rollout = self._rollout
        if fleet.autoscale or rollout is not None:
            bounds = [(fleet.min_workers, fleet.max_workers) if fleet.autoscale else (fleet.workers, fleet.workers)]
            if self.scenario.rollout is not None:
                bounds.append((0, self.scenario.rollout.max_workers))
            brokers = [each.broker for each in self._fleets.values()]
            self._control = Control(clock, brokers, self, self.scenario, bounds, self._decide, rollout)
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
        return summarise(self.scenario, self._fleets, self._records, self._samples, self._control, rollout)

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
        if self._clock.now >= self._ends:
            return
        self._submit(request)
        self._next(others)

    def _think(self, stream: tuple[Source, int]) -> None:
        if self._clock.now < self._ends:
            self._submit(stream[0].closed(stream[1], self._clock.now))

    def _submit(self, request: Request) -> None:
        request.number = self._records.new(request)
        count = len(self._ingresses)
        request.ingress = self._balancer.randrange(count) if count > 1 else 0
        ingress = self._ingress_of(request)
        try:
            resolved = self._router.resolve(MODEL, None, f"{self.scenario.seed} {request.number}")
            request.version = resolved.version.version
            if ingress is not self._direct:
                ingress.check(request)
        except HeadraceError as error:
            self.refused(request, error)
            return
        if request.given_up_at < float("inf"):
            self._clock.at(request.given_up_at, self._cancel, request)
        ingress.submit(request)

    def _ingress_of(self, request: Request) -> Ingress:
        direct = self._sources[request.source].traffic.direct
        return self._direct if direct else self._ingresses[request.ingress]

    def _cancel(self, request: Request) -> None:
        if request.done >= 0 or request.refused:
            return
        self._records.cancelled(request)
        if self._fleets[request.version].broker.withdraw(request):
            self._ingress_of(request).left(request)
        else:
            any(worker.cancel(request) for worker in self.workers.values() if worker.slots)

    def accepted(self, request: Request) -> None:
        self._ingress_of(request).accepted(request, self.scenario.fleet.path_ms / 1e3)

    def finished(self, request: Request) -> None:
        self._records.finished(request)
        tpot_s = (request.done - request.first) / (request.output - 1) if request.output > 1 else None
        self._ended(request, 200, request.first - request.at, tpot_s)

    def refused(self, request: Request, error: HeadraceError) -> None:
        """Answered with an error."""
        request.refused = error.code
        self._records.refused(request, error)
        self._ended(request, error.status, None, None)

    def _ended(self, request: Request, status: int, ttft_s: float | None, tpot_s: float | None) -> None:
        if self._rollout is not None and request.version:
            self._rollout.note(request.version, status, ttft_s, tpot_s)
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        if request.stream >= 0:
            source = self._sources[request.source]
            pause_s = source.traffic.think_s + self.scenario.fleet.path_ms / 1e3
            self._clock.at(self._clock.now + pause_s, self._think, (source, request.stream))

    # -- workers -----------------------------------------------------------------------------------------------------

    def start_worker(self, version: str, warm: bool = False) -> None:
        """Start one; `warm`: it is loaded already."""
        self._workers_made += 1
        fleet = self._fleets[version]
        worker = Worker(self._workers_made, fleet, self._clock.now)
        self.workers[worker.name] = worker
        if warm:
            worker.begin()
        else:
            self._clock.at(self._clock.now + fleet.profile.start_s, worker.begin)

    def gone(self, worker: Worker) -> None:
        """A worker is not there any more."""
        del self.workers[worker.name]
        seconds = max(0.0, min(worker.ended, self._ends) - max(worker.started, self._starts))
        self._records.worker_s[worker.version] += seconds
        if self._control is not None:
            self._control.ended(worker)

    # -- the rollout -------------------------------------------------------------------------------------------------

    def _routed(self, route: Route, deployment: Deployment) -> None:
        """The route has changed: ingresses follow it, and requesters take back what is queued for a withdrawn version."""
        self._router.put_route(route)
        if NEW in route.withdrawn:
            self._fleets[NEW].broker.rehome(lambda request: self._ingress_of(request).move(request, OLD))
        spec = self.scenario.rollout
        if deployment.ended and spec is not None and spec.stop_s is not None:
            self._ends = self._records.ends = min(self._ends, self._clock.now + spec.stop_s)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        later = self._clock.now + fault.seconds
        if fault.kind == "broker_pause":
            for each in self._fleets.values():
                each.broker.paused = True
                self._clock.at(later, each.broker.resume)
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

    def _service(self) -> Counter[str]:
        """What tenants were charged so far."""
        total: Counter[str] = Counter()
        for fleet in self._fleets.values():
            total.update(fleet.service)
        for worker in self.workers.values():
            total.update(worker.service())
        return total

    def _sample(self, _: object) -> None:
        now = self._clock.now
        if not self._samples:
            self._records.served.subtract(self._service())
        if now >= self._ends:
            self._records.served.update(self._service())
            for worker in self.workers.values():
                self._records.worker_s[worker.version] += max(0.0, self._ends - max(worker.started, self._starts))
            return
        states = Counter(worker.state for worker in self.workers.values())
        brokers = [each.broker for each in self._fleets.values()]
        self._samples.append(
            Sample(
                at_s=round(now - self._starts, 3),
                workers=dict(states),
                queued=sum(each.pending for each in brokers),
                claimed=sum(each.claimed for each in brokers),
                versions=dict(Counter(worker.version for worker in self.workers.values())) if self._rollout else {},
            )
        )
        for ingress in (*self._ingresses, self._direct):
            for tenant in self._limits if ingress.lanes.queued_of_all else ():
                self._records.waiting[tenant] += ingress.lanes.queued(tenant)
        for worker in self.workers.values():
            for tenant, count in worker.holding.items():
                self._records.held[tenant] += count
        self._clock.at(min(self._ends, now + self.scenario.seconds / SAMPLES), self._sample)


def _defect(scenario: Scenario) -> Defect:
    """Of the new version."""
    rollout, errors = scenario.rollout, scenario.fleet.errors
    if rollout is None:
        return Defect(errors=errors)
    return Defect(
        unloadable=rollout.fault == "unloadable",
        fatal=rollout.fault == "fatal",
        errors=errors + (rollout.share if rollout.fault == "errors" else 0.0),
        ttft_times=(rollout.times or 3.0) if rollout.fault == "ttft" else 1.0,
    )


def _recover(worker: Worker) -> None:
    worker.slow(1.0)


def simulate(scenario: Scenario, on_progress: OnProgress = lambda share: None) -> Result:
    """Raises BadRequest."""
    return Simulation(scenario).run(on_progress)
