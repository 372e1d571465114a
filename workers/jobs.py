"""What one worker does about the detached work that it holds. Pure: events and the time in, actions out.

Nobody waits for the answer of a job: the worker gathers it, keeps checkpoints of it, stores it as the job's result and then
acknowledges the message. The table of docs/protocol.md, "Detached requests", is implemented here and nowhere else.

All times are monotonic seconds. `claim` in an event names the claim that the action was of: one that is over is not meant.
"""

import enum
from collections import Counter
from collections.abc import Iterable

import msgspec

from shared.errors import Cancelled, GenerationDeadline, Poisoned, QueueDeadline
from shared.results import Checkpoint, Kept, Part, Result
from shared.wire import About, Found, Input, Request, Usage, WireError, new_id
from workers.engine.request import TokenEvent
from workers.trials import DEATHS_SUSPECT, Trials

CHECKPOINT_TOKENS = 1000  # of a job that has so many tokens checkpoints are twice as rare, and so on
LOGPROB_TOKENS = 20  # as much room as so many tokens
RETRY_S = 1.0  # after a write that failed


class JobLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The timers of a worker's jobs, in seconds, and its bounds."""

    checkpoint_every_s: float = 1.0
    patience_s: float = 2.0  # without a token, and others keep it from the batch: it is handed back
    deaths_max: int = 4


class JobDelivery(msgspec.Struct, kw_only=True):
    """A message of JOB as it came out of a pull."""

    request: Request
    tenant: str
    seq: int
    handle: str  # its ack subject
    deliveries: int = 1
    queued_ms: int = 0
    deadline: float  # when it is given up
    keep_s: int = 0  # how long its result is kept; 0: as long as any


class Look(msgspec.Struct, frozen=True):
    """Read what is kept of the job: `found`."""

    claim: str
    delivery: JobDelivery


class Begin(msgspec.Struct, frozen=True):
    """Prepare the input and submit it to the engine as run `run`, going on after `prefix` (ids per choice)."""

    run: str
    request: Request
    tenant: str
    prefix: list[list[int]]


class Cut(msgspec.Struct, frozen=True):
    """Cancel the run, whether it is still being prepared or in the engine."""

    run: str


class Save(msgspec.Struct, frozen=True):
    """Write a checkpoint after the one of the sequence `last`: `saved`, `lost` or `unsaved`. Not held: add up what it took."""

    claim: str
    delivery: JobDelivery
    checkpoint: Checkpoint
    last: int


class Store(msgspec.Struct, frozen=True):
    """Write the result: `stored` or `unstored`. One that is poisoned is put into the DLQ before."""

    claim: str
    delivery: JobDelivery
    result: Result


class Settle(msgspec.Struct, frozen=True):
    """The result is stored: write down what the job came to, then ack its messages."""

    delivery: JobDelivery
    result: Result
    handles: list[str]


class HandBack(msgspec.Struct, frozen=True):
    """Hand the messages back: they are redelivered at once."""

    handles: list[str]


Action = Look | Begin | Cut | Save | Store | Settle | HandBack


class _State(enum.Enum):
    LOOKING = "what is kept of it is being read"
    CLAIMING = "that it is held here is being written down"
    WAITING = "another suspect is on trial"
    RUNNING = "in the engine, or on its way there"
    LEAVING = "a checkpoint is being written, to be handed back with"
    ENDED = "its result is being written"


_HOLDS_SLOT = (_State.LOOKING, _State.CLAIMING, _State.WAITING, _State.RUNNING)


class _Job:
    """A job that this worker holds. `rid` and `deaths` make it a suspect (workers.trials)."""

    def __init__(self, delivery: JobDelivery, now: float) -> None:
        self.claim = new_id()
        self.rid = delivery.request.rid
        self.delivery = delivery
        self.handles = {delivery.seq: delivery.handle}
        self.state = _State.LOOKING
        self.parts = [Part() for _ in range(delivery.request.sampling.n)]
        self.usage: Usage | None = None
        self.deaths = self.claims = 0
        self.gpu_s = 0.0
        self.run = ""
        self.runs = 0
        self.last = 0  # the sequence of the checkpoint that is stored
        self.saving = False
        self.cleared = False  # the last checkpoint said that it is no suspect
        self.marked = False  # the checkpoint that is stored, or its lack, says that it is held here
        self.save_at = now  # the next checkpoint, at the earliest
        self.changed = False  # since the last one
        self.moved_at = now  # when it last had a token
        self.result: Result | None = None
        self.retry_at: float | None = None  # when to write it again
        self.wanted_end: WireError | None = None  # as soon as it is known how far it had come
        self.wanted_back = False

    @property
    def tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)


class JobTable:
    """All jobs of one worker."""

    def __init__(self, limits: JobLimits) -> None:
        self.limits = limits
        self.draining = False
        self.holding_of: Counter[str] = Counter()  # by tenant: jobs that hold a slot, or would
        self.outcomes = {"completed": 0, "failed": 0, "cancelled": 0, "moved": 0}  # of claims that are over
        self._jobs: dict[str, _Job] = {}  # by rid
        self._runs: dict[str, _Job] = {}
        self._trials: Trials[_Job] = Trials()

    # -- queries -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Jobs whose messages are held."""
        return len(self._jobs)

    def __contains__(self, rid: str) -> bool:
        return rid in self._jobs

    @property
    def ended(self) -> int:
        """Jobs whose results are not stored yet."""
        return sum(job.state is _State.ENDED for job in self._jobs.values())

    def handles(self) -> list[str]:
        """The ack subjects that the in-progress loop keeps alive."""
        return [handle for job in self._jobs.values() for handle in job.handles.values()]

    def held_of(self) -> Counter[str]:
        """Messages held, by tenant."""
        held: Counter[str] = Counter()
        for job in self._jobs.values():
            held[job.delivery.tenant] += len(job.handles)
        return held

    def find(self, about: About) -> Found | None:
        """The request of that job, its input left out; None: not here."""
        job = self._jobs.get(about.rid)
        if job is None or job.delivery.tenant != about.tenant or job.state is _State.LEAVING:
            return None
        return Found(job.delivery.seq, msgspec.structs.replace(job.delivery.request, input=Input()))

    # -- the broker ----------------------------------------------------------------------------------------------------

    def message(self, delivery: JobDelivery, now: float) -> list[Action]:
        """A message was pulled."""
        rid = delivery.request.rid
        if (job := self._jobs.get(rid)) is not None:
            job.handles[delivery.seq] = delivery.handle
            return []
        if self.draining:
            return [HandBack([delivery.handle])]
        job = self._jobs[rid] = _Job(delivery, now)
        self.holding_of[delivery.tenant] += 1
        return [Look(job.claim, delivery)]

    def found(self, rid: str, claim: str, kept: Kept, now: float) -> list[Action]:
        """What is kept of a job, as a `Look` asked."""
        job = self._at(rid, claim, _State.LOOKING)
        if job is None:
            return []
        if kept.result is not None:
            return self._settle(job, kept.result)
        self._take_over(job, kept)
        if job.wanted_end is not None:
            return self._end(job, job.wanted_end)
        if now >= job.delivery.deadline:
            return self._expire(job)
        if job.deaths >= self.limits.deaths_max:
            return self._end(job, WireError(Poisoned.code, f"the job ended {job.deaths} workers"))
        if job.wanted_back:
            return self._leave(job)
        if job.delivery.deliveries == 1 and kept.checkpoint is None:
            job.marked = True  # nobody had it: the next one will see by the message that somebody did
            return self._start(job, now)
        self._move(job, _State.CLAIMING)
        return [self._save(job, held=job.deaths < DEATHS_SUSPECT)]  # who waits for a trial must not be counted dead

    def unfound(self, rid: str, claim: str) -> list[Action]:
        """It could not be read: hand the job back as it is."""
        job = self._at(rid, claim, _State.LOOKING)
        return [] if job is None else self._forget(job, "moved", [HandBack(list(job.handles.values()))])

    def saved(self, rid: str, claim: str, sequence: int, now: float) -> list[Action]:
        """A checkpoint is stored."""
        job = self._at(rid, claim)
        if job is None:
            return []
        job.last, job.saving = sequence, False
        spacing = 1 + self._weight(job) / CHECKPOINT_TOKENS
        job.save_at = now + self.limits.checkpoint_every_s * spacing
        if job.state is _State.LEAVING:
            if not job.wanted_back:
                return self._forget(job, "moved", [HandBack(list(job.handles.values()))])
            job.wanted_back = False
            return [self._save(job, held=False)]
        if job.state is _State.RUNNING and job.cleared:
            self._trials.over(job.rid)
            return self._next_trial(now)
        if job.state is not _State.CLAIMING:
            return []
        if job.wanted_end is not None:
            return self._end(job, job.wanted_end)
        if job.wanted_back:
            return self._leave(job)
        return self._start(job, now)

    def lost(self, rid: str, claim: str) -> list[Action]:
        """Another claim has written a checkpoint: it has the job now. No ack and no NAK: it may hold the same message."""
        job = self._at(rid, claim)
        if job is None or job.state is _State.ENDED:  # its result is as good as the other's
            return []
        return self._forget(job, "moved", self._stop(job))

    def unsaved(self, rid: str, claim: str, now: float) -> list[Action]:
        """A checkpoint could not be stored. The work goes on without."""
        job = self._at(rid, claim)
        if job is None:
            return []
        job.saving, job.changed = False, True
        job.save_at = now + max(RETRY_S, self.limits.checkpoint_every_s)
        if job.state in (_State.LEAVING, _State.CLAIMING):
            return self._forget(job, "moved", [*self._stop(job), HandBack(list(job.handles.values()))])
        return []

    def stored(self, rid: str, claim: str, result: Result) -> list[Action]:
        """The job has a result: this one, whoever wrote it."""
        job = self._at(rid, claim, _State.ENDED)
        return [] if job is None else self._settle(job, result)

    def unstored(self, rid: str, claim: str, now: float) -> list[Action]:
        """The result could not be stored: try again later."""
        if (job := self._at(rid, claim, _State.ENDED)) is not None:
            job.retry_at = now + RETRY_S
        return []

    # -- the engine ----------------------------------------------------------------------------------------------------

    def tokens(self, events: Iterable[TokenEvent], now: float) -> list[Action]:
        """One step's events."""
        actions: list[Action] = []
        for event in events:
            job = self._runs.get(event.key)
            if job is None:
                continue
            if event.error is not None:
                self._run_over(job)
                actions += self._end(job, WireError(*event.error))
                continue
            part = job.parts[event.choice]
            part.ids += event.ids
            part.text += event.text
            if event.logprobs is not None:
                part.logprobs = (part.logprobs or []) + event.logprobs
            part.finish = part.finish or event.finish
            part.vector = event.vector or part.vector
            if event.ids or event.vector:
                job.changed, job.moved_at = True, now
            if event.usage is not None:
                self._run_over(job)
                job.usage = event.usage
                actions += self._end(job, None)
            elif (
                event.ids or event.vector
            ) and job.deaths:  # it is no suspect: that has to be known before another one may end this worker
                job.deaths, job.save_at = 0, now
                actions += [] if job.saving else [self._save(job)]
        return actions + self._next_trial(now)

    def failed(self, run: str, error: WireError) -> list[Action]:
        """The input of a run was refused."""
        job = self._runs.get(run)
        if job is None:
            return []
        self._run_over(job)
        return self._end(job, error)

    def put_off(self, run: str) -> list[Action]:
        """What it needs cannot be had for now: hand it back."""
        job = self._runs.get(run)
        return [] if job is None else self._leave(job)

    # -- anybody of the tenant, time and the end -----------------------------------------------------------------------

    def cancel(self, about: About) -> tuple[bool, list[Action]]:
        """End a job: whether it is here, and will be settled."""
        job = self._jobs.get(about.rid)
        if job is None or job.delivery.tenant != about.tenant or job.state is _State.LEAVING:
            return False, []
        if job.state is _State.ENDED:
            return True, []
        error = WireError(Cancelled.code, "the job was cancelled")
        if job.state in (_State.LOOKING, _State.CLAIMING):
            job.wanted_end = error
            return True, []
        return True, self._end(job, error)

    def tick(self, now: float, room: int) -> list[Action]:
        """All timers that are due. `room`: slots that nobody else needs."""
        actions: list[Action] = []
        for job in list(self._jobs.values()):
            if job.state is _State.ENDED and job.retry_at is not None and now >= job.retry_at:
                job.retry_at = None
                actions += self._store(job)
            elif job.state in (_State.RUNNING, _State.WAITING) and now >= job.delivery.deadline:
                actions += self._expire(job)
            elif job.state is _State.RUNNING and job.changed and not job.saving and now >= job.save_at:
                actions.append(self._save(job))
        actions += self._give_up_excess(now, room)
        return actions + self._next_trial(now)

    def drain(self) -> list[Action]:
        """No new jobs from now on; those that are held are handed back, with how far they have come."""
        self.draining = True
        actions: list[Action] = []
        for job in list(self._jobs.values()):
            actions += self._back(job)
        return actions

    # -- a job's life --------------------------------------------------------------------------------------------------

    def _at(self, rid: str, claim: str, state: _State | None = None) -> _Job | None:
        job = self._jobs.get(rid)
        if job is None or job.claim != claim or (state is not None and job.state is not state):
            return None
        return job

    def _move(self, job: _Job, state: _State) -> None:
        if job.state in _HOLDS_SLOT and state not in _HOLDS_SLOT:
            tenant = job.delivery.tenant
            self.holding_of[tenant] -= 1
            if not self.holding_of[tenant]:
                del self.holding_of[tenant]
        job.state = state

    def _take_over(self, job: _Job, kept: Kept) -> None:
        job.last = kept.sequence
        before = kept.checkpoint
        if before is None:
            job.deaths = int(job.delivery.deliveries > 1)
            job.claims = 1 + job.deaths
            return
        job.deaths = before.deaths + before.held
        job.claims = before.claims + 1
        job.gpu_s = before.gpu_s
        if before.version == job.delivery.request.version and len(before.parts) == len(job.parts):
            job.parts = before.parts

    def _start(self, job: _Job, now: float) -> list[Action]:
        if not self._trials.may_start(job):
            self._move(job, _State.WAITING)
            return []
        self._trials.started(job)
        if not job.marked:
            self._move(job, _State.CLAIMING)
            return [self._save(job)]
        self._move(job, _State.RUNNING)
        job.runs += 1
        job.run = f"{job.claim}.{job.runs}"
        job.moved_at = now
        self._runs[job.run] = job
        prefix = [list(part.ids) for part in job.parts]
        return [Begin(job.run, job.delivery.request, job.delivery.tenant, prefix)]

    def _next_trial(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (job := self._trials.next()) is not None:
            actions += self._start(job, now)
        return actions

    def _run_over(self, job: _Job) -> None:
        """The engine has ended it."""
        self._runs.pop(job.run, None)
        job.run = ""

    def _stop(self, job: _Job) -> list[Action]:
        self._trials.forget(job.rid)
        run, job.run = job.run, ""
        return [Cut(run)] if run and self._runs.pop(run, None) is not None else []

    def _save(self, job: _Job, held: bool = True) -> Save:
        job.saving, job.changed, job.marked = True, False, held
        job.cleared = not job.deaths
        parts = [
            Part(list(each.ids), list(each.text), each.logprobs and list(each.logprobs), each.finish, each.vector)
            for each in job.parts
        ]
        checkpoint = Checkpoint(
            version=job.delivery.request.version,
            claim=job.claim,
            held=held,
            parts=parts,
            deaths=job.deaths,
            claims=job.claims,
            gpu_s=job.gpu_s,
        )
        return Save(job.claim, job.delivery, checkpoint, job.last)

    def _weight(self, job: _Job) -> int:
        return job.tokens * (1 if job.delivery.request.sampling.logprobs is None else LOGPROB_TOKENS)

    def _expire(self, job: _Job) -> list[Action]:
        if job.tokens:
            return self._end(job, WireError(GenerationDeadline.code, "the job did not end in time"))
        return self._end(job, WireError(QueueDeadline.code, "no worker had room for the job in time"))

    def _end(self, job: _Job, error: WireError | None) -> list[Action]:
        actions = self._stop(job)
        self._move(job, _State.ENDED)
        job.result = Result(
            version=job.delivery.request.version,
            claim=job.claim,
            parts=job.parts,
            ended_at=0.0,
            usage=job.usage,
            error=error,
            claims=job.claims,
            queue_s=job.delivery.queued_ms / 1000,
            gpu_s=job.gpu_s,
        )
        return actions + self._store(job)

    def _store(self, job: _Job) -> list[Action]:
        return [] if job.result is None else [Store(job.claim, job.delivery, job.result)]

    def _settle(self, job: _Job, result: Result) -> list[Action]:
        code = "" if result.error is None else result.error.code
        outcome = "completed" if not code else "cancelled" if code == Cancelled.code else "failed"
        return self._forget(job, outcome, [Settle(job.delivery, result, list(job.handles.values()))])

    def _back(self, job: _Job) -> list[Action]:
        """Hand a job back as soon as it is known how far it has come."""
        if job.state in (_State.RUNNING, _State.WAITING):
            return self._leave(job)
        if job.state in (_State.LOOKING, _State.CLAIMING):
            job.wanted_back = True
        return []

    def _leave(self, job: _Job) -> list[Action]:
        actions = self._stop(job)
        self._move(job, _State.LEAVING)
        job.wanted_back = job.saving  # the one under way says that it is held: another one follows
        return actions if job.saving else [*actions, self._save(job, held=False)]

    def _forget(self, job: _Job, outcome: str, actions: list[Action]) -> list[Action]:
        self._move(job, _State.ENDED)
        self.outcomes[outcome] += 1
        del self._jobs[job.rid]
        return actions

    def _give_up_excess(self, now: float, room: int) -> list[Action]:
        """Those that others have kept from the batch for long: another worker may have room for them."""
        excess = self.holding_of.total() - room
        if excess <= 0:
            return []
        stuck = [
            job
            for job in self._jobs.values()
            if job.state is _State.RUNNING and now - job.moved_at > self.limits.patience_s
        ]
        stuck.sort(key=lambda job: job.moved_at)
        return [action for job in stuck[:excess] for action in self._leave(job)]
