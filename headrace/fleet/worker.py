"""A simulated worker: the production's pull credit, scheduler, pacer, observer and hand-back over a cost model.

Where nothing but decodes can come, `Scheduler.outlook` says for how many steps; they are one event, and whoever arrives
meanwhile ends it at the next step edge. A test shows that nothing depends on that.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Coroutine
from typing import Any

from headrace.fleet.fair import FairSide
from headrace.fleet.pool import GAP_BUCKETS_PER_MS, Fleet
from headrace.fleet.workload import Request
from shared.errors import ContextLength, EngineFailed, HeadraceError
from shared.pull import Credit
from shared.streams import ConsumerInfo
from shared.subjects import LANE_FAIR
from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.fairness import OUTPUT_COST
from workers.engine.observer import StepObserver
from workers.engine.pacer import Pacer
from workers.engine.request import EngineRequest, Standing, TenantLimits
from workers.engine.runs import Run
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Load, StepPlan, load_of
from workers.engine.sim import SimulatedText
from workers.handback import HandBack, free_slots, hold_max_of
from workers.turns import Turns, mean_service

TEXT = SimulatedText()


class Worker:
    """starting -> active -> draining -> gone, or lost at any time."""

    def __init__(self, number: int, fleet: Fleet, started: float) -> None:
        self.name = f"w{number}"
        self.state, self.since = "starting", started
        self.started, self.ended = started, -1.0
        self.slowdown = 1.0
        self.listens = False
        self.slots = 0  # as its lease says: 0 while it is not known
        self._fleet = fleet
        self._clock, self._broker = fleet.clock, fleet.broker
        self._held: dict[str, Request] = {}  # by the run's key: each holds a slot
        self.holding: dict[str, int] = {}  # the same, counted by tenant
        self._handed_back: set[int] = set()
        self._inbox: list[Request | str | dict[str, TenantLimits]] = []
        self._outside: dict[str, TenantLimits] = {}  # who waits to be claimed, as the engine was told
        self._epoch = 0  # of the event that this worker waits for
        self._ends: list[float] = []  # of the steps that are under way and are all decodes
        self._load = Load()  # of the first of them
        self._until = 0  # of them, those that are run: more only if nothing comes
        self._left = 0  # steps before none in the batch is at its end
        self._begin = 0.0
        self._plan: StepPlan | None = None  # the step that is under way, if it is of another kind
        self._whole = True  # each in its batch has its first token
        self._waking = False  # it was idle, and is to begin
        self._rank = number  # of its steps among those that end at the same moment
        self._submitted = self._prompt_tokens = self._generated = 0
        self._stirred = 0.0  # when a pull from fast was sent, or a message of it came
        self._pull_number = 0
        self._pulls: list[tuple[str, float]] = []  # name, and when it expires

    @property
    def version(self) -> str:
        return self._fleet.version

    @property
    def claims(self) -> int:
        return len(self._held)

    @property
    def unbatched(self) -> int:
        """Claims that wait for the batch, as its lease says."""
        return self._scheduler.ledger.waiting if self.slots else 0

    # -- its life ----------------------------------------------------------------------------------------------------

    def begin(self, _: object = None) -> None:
        """Loaded: it claims from now on."""
        if self.state != "starting":
            return
        fleet, engine, settings = self._fleet, self._fleet.engine, self._fleet.settings
        if fleet.defect.unloadable:
            self._end("failed")
            return
        self.state, self.since, self.slots, self.listens = "active", self._clock.now, fleet.slots, True
        self._scheduler = Scheduler(
            BlockPool(fleet.blocks),
            fleet.slots,
            engine.prefill_chunk,
            reserved_fraction=engine.slots_reserved_fraction,
            length_max=fleet.length_max,
            pacer=Pacer(engine.tpot_ms_target, fleet.cost),
            prefix_cache=engine.prefix_cache,
        )
        self._observer = StepObserver(engine.ttft_ms_target)
        self._credit = Credit(min(settings.pull_heartbeat_s, 0.4 * settings.pull_expires_s), settings.pull_expires_s)
        self._handback = HandBack(self._info, lambda: self._credit.open, self._hand_back)
        self._hold_max = hold_max_of(fleet.slots, engine.slots_reserved_fraction)
        self._turns = Turns(self._hold_max)
        self._fair = FairSide(
            self._clock,
            self._broker,
            settings,
            self._turns,
            fleet.slots - self._hold_max,
            self._free,
            lambda now: now - self._stirred if self._credit.outstanding else 0.0,
            self._share,
            self._claim,
        )
        self._pull()
        self._fair.start()

    def drain(self) -> None:
        """Claim no more, let what is claimed finish, and end."""
        if self.state == "starting":
            self._end("gone")
            return
        self.state, self.since, self.listens = "draining", self._clock.now, False
        self._fair.stop()
        self._clock.at(self._clock.now + self._fleet.settings.drain_budget_s, self._drain_is_over)
        self._end_if_drained()

    def slow(self, times: float) -> None:
        """Its device takes so many times as long from the next step on."""
        self.slowdown = times
        self._cut_short()

    def lose(self, held_s: float) -> None:
        """Its device is gone. Its messages come back after `held_s`: requesters hear nothing, ask, and hand them back."""
        if self.state in ("gone", "lost"):
            return
        for request in self._leave_all():
            self._clock.at(self._clock.now + held_s, self._give_back, request)
        self._end("lost")

    def _drain_is_over(self, _: object) -> None:
        if self.state == "draining":
            for request in self._leave_all():
                self._give_back(request)
            self._end("gone")

    def _leave_all(self) -> list[Request]:
        """What it holds, with the tokens that it has handed out."""
        if self.state == "starting":
            return []
        if self._ends:
            self._decode(min(self._until, bisect_right(self._ends, self._clock.now)))
        left = list(self._held.values())
        for choice in [*self._scheduler.running, *self._waiting()]:
            choice.memo.made = len(choice.tokens) - choice.prompt_length
        self._held.clear()
        self.holding.clear()
        return left

    def _waiting(self) -> list[Any]:
        return [choice for account in self._scheduler.ledger.order() for choice in account.waiting]

    def _end(self, state: str) -> None:
        if self.slots:
            self._fair.stop()
            self._fleet.service.update(self.service())
        self.state, self.since, self.ended = state, self._clock.now, self._clock.now
        self.listens = False
        self._epoch += 1
        self._fleet.listener.gone(self)

    def _end_if_drained(self) -> None:
        if self.state == "draining" and not self._held:
            self._end("gone")

    def _give_back(self, request: Request) -> None:
        self._broker.give_back(request)

    # -- claims ------------------------------------------------------------------------------------------------------

    def message(self, request: Request) -> None:
        """The broker delivers, from fast."""
        self._stirred = now = self._clock.now
        is_last = self._credit.message(now)
        self._fair.fast_claimed()
        self._claim(request)
        if is_last:
            self._pull()
            self._fair.pump()
        else:
            self._pump()

    def _claim(self, request: Request) -> None:
        request.claims += 1
        if request.accepted < 0:
            request.accepted = self._clock.now
            self._fleet.listener.accepted(request)
        self._held[f"{request.number}.{request.claims}"] = request
        self.holding[request.tenant] = self.holding.get(request.tenant, 0) + 1
        if self._fleet.defect.fatal:
            self.lose(self._fleet.settings.silence_s)
            return
        self._inbox.append(request)
        self._arrived()

    def _drop(self, key: str) -> Request:
        """It is held no more."""
        request = self._held.pop(key)
        left = self.holding[request.tenant] - 1
        if left:
            self.holding[request.tenant] = left
        else:
            del self.holding[request.tenant]
        if request.lane == LANE_FAIR:
            self._fair.released(request.tenant)
        return request

    def _acknowledge(self, key: str) -> None:
        self._broker.acknowledge(self._drop(key))

    def cancel(self, request: Request) -> bool:
        """The client has left. Whether this worker had its request."""
        key = f"{request.number}.{request.claims}"
        if key not in self._held:
            return False
        self._inbox.append(key)
        self._arrived()
        return True

    def pull_ended(self, name: str, left: int) -> None:
        if self._credit.ended(name, left):
            self._pull()

    def _free(self) -> int:
        full = self._scheduler.blocked or self.state == "draining"
        return free_slots(self.slots, self._hold_max, self.holding, full)

    def _pump(self) -> None:
        if self.listens:
            if self._credit.is_worth_a_pull(self._free()):
                self._pull()
            self._fair.pump()

    def _pull(self) -> None:
        now, credit = self._clock.now, self._credit
        if not self._broker.paused:  # its heartbeats, of this second
            self._pulls = [pull for pull in self._pulls if pull[1] > now and credit.heartbeat(pull[0], now)]
        batch = credit.next(self._free(), now)
        if batch > 0 and self.listens:
            self._pull_number += 1
            name, expires = str(self._pull_number), now + self._fleet.settings.pull_expires_s
            credit.pulled(name, batch, now)
            self._stirred = now
            self._pulls.append((name, expires))
            self._broker.pull(self, name, batch, expires)

    def _share(self, credit: int) -> list[tuple[str, int]]:
        """Whose backlog to take so many requests from. The engine is told who has one."""
        limits = {tenant: self._fleet.limits[tenant] for tenant in self._turns.tenants}
        if limits != self._outside:
            self._outside = limits
            self._inbox.append(limits)
            self._arrived()
        if not credit or not limits:
            return []
        done = self._steps_done()
        service = mean_service(self._prompt_tokens, self._generated + done * self._load.sequences, self._submitted)
        return self._turns.share(credit, self.holding, self._standings(done), limits, service)

    def _standings(self, done: int) -> dict[str, Standing]:
        """With what `done` steps of those under way are charged for."""
        ledger = self._scheduler.ledger
        for account in ledger.active:
            account.output += done * account.slots
        standings = {tenant: ledger.standing(tenant) for tenant in self._turns.tenants}
        for account in ledger.active:
            account.output -= done * account.slots
        return standings

    def _steps_done(self) -> int:
        """Of those under way."""
        return bisect_left(self._ends, self._clock.now)

    def service(self) -> dict[str, int]:
        """What its tenants were charged so far: of those that metrics tell apart."""
        if not self.slots:
            return {}
        ledger, done = self._scheduler.ledger, self._steps_done()
        ledger.publish()
        service = dict(ledger.service)
        for account in ledger.active:
            if account.tenant in service:
                service[account.tenant] += OUTPUT_COST * done * account.slots
        return service

    async def _info(self) -> ConsumerInfo:
        return self._broker.info()

    def _hand_back(self, key: str) -> None:
        request = self._held.get(key)
        if request is None or request.number in self._handed_back:
            return
        self._handed_back.add(request.number)
        self._drop(key)
        self._remove(key)
        self._broker.give_back(request)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """Something is in the inbox: it is taken in at the next step edge."""
        if self._ends:
            self._cut_short()
        elif self._plan is None and not self._waking:
            self._waking = True  # what comes at the same moment is taken in together
            self._clock.at(self._clock.now, self._wake_up, None, self._rank)

    def _cut_short(self) -> None:
        """Of the steps under way, only the present one is run."""
        until = bisect_left(self._ends, self._clock.now) + 1
        if self._ends and until < self._until:
            self._until = until
            self._wait(self._ends[until - 1])

    def _wake_up(self, _: object) -> None:
        self._waking = False
        if self._plan is None and not self._ends and self.state in ("active", "draining"):
            self._edge(None)

    def _wait(self, when: float) -> None:
        self._epoch += 1
        self._clock.at(when, self._wake, self._epoch, self._rank)

    def _wake(self, epoch: int) -> None:
        """The steps under way are done."""
        if epoch != self._epoch:
            return
        if self._plan is not None:
            self._commit(self._plan)
        else:
            self._decode(self._until)
        self._look_for_others()
        self._pump()
        if self.state in ("active", "draining"):
            self._edge(None)

    def _edge(self, _: object) -> None:
        """Take in what came, and begin the next step."""
        self._intake()
        scheduler, clock = self._scheduler, self._clock
        if scheduler.idle:
            self._observer.idle(scheduler)
            return
        self._begin = clock.now
        told = scheduler.blocked == (scheduler.ledger.waiting > 0)  # else what is blocked changes with the plan
        steps, load = scheduler.outlook() if self._fleet.skips and self._whole and told else (0, self._load)
        if steps:
            self._load, ends, end = load, self._ends, clock.now
            sequences, context = load.sequences, load.context
            stops = self._stops()
            for step in range(steps):
                end += self._seconds(Load(sequences, sequences, context + sequences * step))
                ends.append(end)
                if end >= stops:
                    break
            self._until = len(ends)
        else:
            self._plan = plan = scheduler.plan()
            assert plan.slices, "nothing to compute, and not idle"
            self._fleet.preemptions += plan.preempted
            end = clock.now + self._seconds(plan.load or load_of(plan.slices))
        self._wait(end)

    def _stops(self) -> float:
        """When a look at who waits may be due: it is taken at the first step edge after that."""
        if self._observer.late:
            return 0.0
        return self._observer.tend_at if self._scheduler.ledger.waiting else math.inf

    def _seconds(self, load: Load) -> float:
        ms = self._fleet.profile.step_ms(load) * self.slowdown
        if self._fleet.jitter:
            ms *= 1 + abs(self._fleet.dice.gauss(0.0, 1.2533 * self._fleet.jitter)) - self._fleet.jitter
        return ms / 1e3

    def _intake(self) -> None:
        while self._inbox:  # what a cancel makes room for comes at once
            item = self._inbox.pop(0)
            if isinstance(item, Request):
                self._start(item)
            elif isinstance(item, dict):
                self._scheduler.ledger.expect(item)
            elif item in self._held:
                self._acknowledge(item)
                self._remove(item)
                self._pump()

    def _start(self, request: Request) -> None:
        scheduler, engine, now = self._scheduler, self._fleet.engine, self._clock.now
        key = f"{request.number}.{request.claims}"
        length_max = request.prompt + request.output
        problem: HeadraceError | None = None
        if length_max > min(self._fleet.length_max, scheduler.capacity(request.limits)):
            problem = ContextLength("it does not fit into a worker")
        elif self._fleet.defect.errors and self._fleet.dice.random() < self._fleet.defect.errors:
            problem = EngineFailed("the engine failed")
        if problem is not None:
            self._acknowledge(key)
            self._fleet.listener.refused(request, problem)
            self._end_if_drained()
            return
        targets = [request.at + self._fleet.settings.queue_deadline_s]
        if engine.ttft_ms_target is not None:
            targets.append(now + engine.ttft_ms_target / 1e3)
        run = Run(
            EngineRequest(
                key=key,
                tenant=request.tenant,
                prompt_ids=_prompt(request),
                sampling=_sampling(request.output),
                prefix=[[0] * request.made] if request.made else [],
                limits=request.limits,
                admit_by=min(targets),
            ),
            length_max,
            TEXT,
        )
        run.begun = now
        self._submitted += 1
        self._prompt_tokens += request.prompt
        (choice,) = run.choices
        choice.memo = request
        scheduler.add(choice, request.limits)

    def _remove(self, key: str) -> None:
        """A run ends before its end; it is held no more."""
        for choice in [*self._scheduler.running, *self._waiting()]:
            if choice.key == key:
                choice.memo.made = len(choice.tokens) - choice.prompt_length
                self._scheduler.remove(choice)
                choice.run.choices.clear()
                break
        self._end_if_drained()

    def _commit(self, plan: StepPlan) -> None:
        scheduler, now, fleet = self._scheduler, self._clock.now, self._fleet
        self._plan = None
        settled = plan.load.decodes if plan.load is not None and self._whole else 0  # they come first, and all go on
        others = plan.slices[settled:]
        draws = settled + sum([part.samples for part in others])
        self._whole = draws == len(plan.slices)
        scheduler.commit(plan, [0] * draws)
        fleet.steps += 1
        self._generated += draws
        firsts = 0
        for part in others:
            choice = part.sequence
            request = choice.memo
            self._left = min(self._left, choice.length_max - len(choice.tokens) + 1)
            if part.count == 1 and request.first >= 0:
                continue
            if request.admitted < 0:
                request.admitted = self._begin
                fleet.cached_tokens += choice.cached
                fleet.prompt_tokens += request.prompt - choice.cached
            if part.samples and request.first < 0:
                request.first = now + (now - request.accepted) * (fleet.defect.ttft_times - 1)
                firsts += 1
        self._count_gaps(now - self._begin, draws - firsts)
        self._observer.step(scheduler, plan, self._begin, now)
        for choice in self._over(1):
            self._finish(choice)

    def _decode(self, steps: int) -> None:
        """The first `steps` of those under way are done: one token for each in the batch in each of them."""
        scheduler, observer, ends, load = self._scheduler, self._observer, self._ends, self._load
        bounds, begin, done = scheduler.pacer.bounds, self._begin, 0
        sequences, context = load.sequences, load.context
        for step in range(steps):
            end = ends[step]
            if end >= observer.tend_at:
                scheduler.decode(step + 1 - done)
                done = step + 1
            seen = Load(sequences, sequences, context + sequences * step) if bounds else None
            observer.step(scheduler, StepPlan([], 0, seen), begin, end)
            self._count_gaps(end - begin, sequences)
            begin = end
        if steps > done:
            scheduler.decode(steps - done)
        self._fleet.steps += steps
        self._generated += steps * sequences
        self._begin = begin
        ends.clear()
        for choice in self._over(steps):
            self._finish(choice)

    def _over(self, steps: int) -> list[Any]:
        """Who has its last token, now that so many steps more are done."""
        self._left -= steps
        if self._left > 0:
            return []
        left = [(each.length_max - len(each.tokens), each) for each in self._scheduler.running]
        self._left = min((count for count, _ in left if count), default=0)
        return [each for count, each in left if not count]

    def _finish(self, choice: Any) -> None:
        """Its last token is there."""
        request: Request = choice.memo
        self._scheduler.remove(choice)
        choice.run.choices.clear()  # a cycle: memory that is not wanted again
        self._acknowledge(choice.key)
        request.done = max(self._clock.now, request.first)
        self._fleet.listener.finished(request)
        self._end_if_drained()

    def _count_gaps(self, seconds: float, tokens: int) -> None:
        gaps, bucket = self._fleet.gaps, int(seconds * (1e3 * GAP_BUCKETS_PER_MS))
        gaps[bucket] = gaps.get(bucket, 0) + tokens

    def _look_for_others(self) -> None:
        late = self._observer.late
        if late and self.state == "active" and self._handback.is_due(late, self._clock.now):
            _complete(self._handback.look(late))


def _complete(look: Coroutine[Any, Any, None]) -> None:
    """Nothing in it waits: the broker answers at once."""
    try:
        look.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def _prompt(request: Request) -> list[int]:
    """Tokens that are like no other request's but for the stem."""
    own = [request.number + 1_000_000] * (request.prompt - request.stem_tokens)
    return [request.stem] * request.stem_tokens + own


_SAMPLINGS: dict[int, Sampling] = {}


def _sampling(output: int) -> Sampling:
    sampling = _SAMPLINGS.get(output)
    if sampling is None:
        sampling = _SAMPLINGS[output] = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    return sampling
