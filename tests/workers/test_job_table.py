"""The table of jobs: event in, actions out."""

import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from shared import wire
from shared.errors import Cancelled, EngineFailed, GenerationDeadline, Poisoned, QueueDeadline
from shared.results import Checkpoint, Kept, Part, Result
from shared.wire import About, Usage, WireError
from workers.engine.request import TokenEvent
from workers.jobs import Action, Begin, Cut, HandBack, JobDelivery, JobLimits, JobTable, Look, Save, Settle, Store

NOTHING = Kept(None, 0, None)
Kind = TypeVar("Kind", bound=Action)


def delivery(rid: str = "r", seq: int = 1, deliveries: int = 1, n: int = 1, deadline: float = 1000.0) -> JobDelivery:
    request = wire.Request(rid, "m", "v", wire.Input(prompt="p"), wire.Sampling(n=n))
    return JobDelivery(
        request=request, tenant="t", seq=seq, handle=f"ack.{seq}", deliveries=deliveries, deadline=deadline
    )


def only(actions: list[Action], kind: type[Kind]) -> Kind:
    (action,) = actions
    assert isinstance(action, kind), action
    return action


def token(
    run: str, ids: list[int], choice: int = 0, finish: str | None = None, usage: Usage | None = None
) -> TokenEvent:
    return TokenEvent(key=run, choice=choice, ids=ids, text=[f"<{each}>" for each in ids], finish=finish, usage=usage)


def checkpoint(ids: list[int], held: bool = True, deaths: int = 0, version: str = "v") -> Checkpoint:
    part = Part(list(ids), [f"<{each}>" for each in ids])
    return Checkpoint(version=version, claim="before", held=held, parts=[part], deaths=deaths, claims=1)


def started(table: JobTable, rid: str = "r", now: float = 0.0) -> tuple[str, str]:
    """Claim a fresh job; its claim and its run."""
    claim = only(table.message(delivery(rid), now), Look).claim
    return claim, only(table.found(rid, claim, NOTHING, now), Begin).run


def test_an_untroubled_job_is_read_started_stored_and_settled() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table)
    assert table.tokens([token(run, [1, 2])], 0.1) == []
    assert table.holding_of["t"] == 1
    store = only(table.tokens([token(run, [3], finish="stop", usage=Usage(1, 3))], 0.2), Store)
    assert store.result.parts == [Part([1, 2, 3], ["<1>", "<2>", "<3>"], None, "stop")]
    assert (store.result.usage, store.result.error, table.holding_of) == (Usage(1, 3), None, {})
    assert table.handles() == ["ack.1"]
    settle = only(table.stored("r", claim, store.result), Settle)
    assert settle.handles == ["ack.1"]
    assert (len(table), table.outcomes["completed"]) == (0, 1)


def test_a_redelivery_goes_on_from_the_checkpoint_once_it_is_written_down_who_has_it() -> None:
    table = JobTable(JobLimits())
    claim = only(table.message(delivery(deliveries=2), 0), Look).claim
    save = only(table.found("r", claim, Kept(checkpoint([1, 2]), 7, None), 0), Save)
    assert (save.last, save.checkpoint.held, save.checkpoint.deaths, save.checkpoint.claims) == (7, True, 1, 2)
    begin = only(table.saved("r", claim, 8, 0), Begin)
    assert begin.prefix == [[1, 2]]
    event = TokenEvent(key=begin.run, choice=0, before=["<1>", "<2>"])
    store = table.tokens([event, token(begin.run, [3], finish="length", usage=Usage(1, 3))], 1)[-1]
    assert isinstance(store, Store)
    assert store.result.parts[0].text == ["<1>", "<2>", "<3>"]


def test_a_job_whose_input_cannot_be_had_for_now_is_handed_back_and_nobody_died_of_it() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table)
    cut, save = table.put_off(run)
    assert isinstance(cut, Cut)
    assert isinstance(save, Save)
    assert (cut.run, save.checkpoint.held, save.checkpoint.deaths) == (run, False, 0)
    assert only(table.saved("r", claim, 1, 0.1), HandBack).handles == ["ack.1"]
    assert (len(table), table.holding_of) == (0, {})
    assert table.put_off(run) == []  # it is over


def test_of_another_version_nothing_is_taken_over() -> None:
    table = JobTable(JobLimits())
    claim = only(table.message(delivery(), 0), Look).claim
    save = only(table.found("r", claim, Kept(checkpoint([1], version="old"), 7, None), 0), Save)
    assert (save.last, save.checkpoint.parts) == (7, [Part()])


def test_a_job_that_has_a_result_is_only_settled() -> None:
    table = JobTable(JobLimits())
    claim = only(table.message(delivery(deliveries=2), 0), Look).claim
    result = Result(version="v", claim="other", parts=[], ended_at=1.0)
    assert only(table.found("r", claim, Kept(None, 0, result), 0), Settle).result is result
    assert len(table) == 0


def test_checkpoints_are_rare_and_rarer_of_long_answers_and_one_is_written_at_a_time() -> None:
    table = JobTable(JobLimits(checkpoint_every_s=1.0))
    claim, run = started(table)
    table.tokens([token(run, [1])], 0.5)
    assert isinstance(only(table.tick(0.5, 9), Save), Save)
    table.tokens([token(run, [2])], 5)
    assert table.tick(5, 9) == []
    table.saved("r", claim, 3, 5)
    assert table.tick(5.9, 9) == []
    save = only(table.tick(6.1, 9), Save)
    assert (save.last, save.checkpoint.parts[0].ids) == (3, [1, 2])
    table.tokens([token(run, list(range(1998)))], 7)
    table.saved("r", claim, 4, 7)
    assert table.tick(9.9, 9) == []
    assert len(table.tick(10.1, 9)) == 1


def test_whoever_finds_another_claims_checkpoint_leaves_the_job_alone() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table)
    table.tokens([token(run, [1])], 1)
    only(table.tick(1, 9), Save)
    assert table.lost("r", claim) == [Cut(run)]
    assert (len(table), table.handles()) == (0, [])


def test_deaths_are_counted_without_a_token_between_them_and_not_of_who_handed_it_back() -> None:
    table = JobTable(JobLimits(deaths_max=4))
    claim = only(table.message(delivery(deliveries=9), 0), Look).claim
    store = only(table.found("r", claim, Kept(checkpoint([], deaths=3), 7, None), 0), Store)
    assert store.result.error is not None
    assert store.result.error.code == Poisoned.code
    table = JobTable(JobLimits(deaths_max=4))
    claim = only(table.message(delivery(deliveries=9), 0), Look).claim
    save = only(table.found("r", claim, Kept(checkpoint([], held=False, deaths=1), 7, None), 0), Save)
    assert save.checkpoint.deaths == 1
    run = only(table.saved("r", claim, 8, 0), Begin).run
    assert only(table.tokens([token(run, [1])], 0.1), Save).checkpoint.deaths == 0


def test_suspects_are_tried_one_at_a_time_and_who_waits_for_its_turn_is_not_said_to_be_held() -> None:
    table = JobTable(JobLimits())
    claims, runs = {}, {}
    for number, rid in enumerate("ab"):
        claims[rid] = only(table.message(delivery(rid, seq=number, deliveries=3), 0), Look).claim
        save = only(table.found(rid, claims[rid], Kept(checkpoint([], deaths=1), 1, None), 0), Save)
        assert (save.checkpoint.deaths, save.checkpoint.held) == (2, False)
    assert only(table.saved("a", claims["a"], 2, 0), Save).checkpoint.held
    runs["a"] = only(table.saved("a", claims["a"], 3, 0), Begin).run
    assert table.saved("b", claims["b"], 2, 0) == []
    assert table.tick(0.1, 9) == []
    cleared = only(table.tokens([token(runs["a"], [1])], 1), Save)
    assert (cleared.checkpoint.held, cleared.checkpoint.deaths) == (True, 0)
    assert table.tick(1.5, 9) == []
    assert only(table.saved("a", claims["a"], 4, 2), Save).checkpoint.held
    assert only(table.saved("b", claims["b"], 3, 1), Begin).prefix == [[]]


@pytest.mark.parametrize("begun", [False, True])
def test_a_deadline_ends_it_by_what_it_has_come_to(begun: bool) -> None:
    table = JobTable(JobLimits())
    claim = only(table.message(delivery(deadline=10.0), 0), Look).claim
    run = only(table.found("r", claim, NOTHING, 0), Begin).run
    if begun:
        table.tokens([token(run, [1])], 9)
        only(table.tick(9, 9), Save)
    actions = table.tick(10, 9)
    assert actions[0] == Cut(run)
    assert isinstance(actions[1], Store)
    assert actions[1].result.error is not None
    assert actions[1].result.error.code == (GenerationDeadline.code if begun else QueueDeadline.code)


def test_a_cancel_waits_for_what_is_known_and_is_nobody_elses() -> None:
    table = JobTable(JobLimits())
    claim = only(table.message(delivery(), 0), Look).claim
    assert table.cancel(About("r", "other")) == (False, [])
    assert table.cancel(About("r", "t")) == (True, [])
    store = only(table.found("r", claim, Kept(checkpoint([1]), 7, None), 0), Store)
    assert store.result.error is not None
    assert (store.result.error.code, store.result.parts[0].ids) == (Cancelled.code, [1])
    assert table.cancel(About("r", "t")) == (True, [])
    assert table.find(About("r", "other")) is None


def test_an_error_of_the_engine_and_a_refused_input_are_results() -> None:
    table = JobTable(JobLimits())
    _, run = started(table, "a")
    actions = table.tokens([TokenEvent(key=run, choice=0, error=(EngineFailed.code, "why"))], 1)
    assert [type(each) for each in actions] == [Store]
    _, run = started(table, "b")
    assert [type(each) for each in table.failed(run, WireError("invalid_request", "no"))] == [Store]


def test_a_result_that_cannot_be_stored_is_tried_again_with_what_it_took() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table)
    store = only(table.tokens([token(run, [1], finish="stop", usage=Usage(1, 1))], 0), Store)
    store.result.gpu_s = 5.0
    assert table.unstored("r", claim, 0) == []
    assert table.tick(0.5, 9) == []
    assert only(table.tick(1.5, 9), Store).result is store.result
    assert table.lost("r", claim) == []
    assert len(table) == 1


def test_a_drain_hands_everything_back_with_how_far_it_has_come() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table, "a")
    table.tokens([token(run, [1])], 1)
    assert isinstance(only(table.tick(1, 9), Save), Save)
    looked = only(table.message(delivery("b", seq=2), 1), Look).claim
    assert table.drain() == [Cut(run)]
    last = only(table.saved("a", claim, 5, 1), Save)
    assert (last.checkpoint.held, last.last) == (False, 5)
    assert table.saved("a", claim, 6, 1) == [HandBack(["ack.1"])]
    assert not only(table.found("b", looked, NOTHING, 1), Save).checkpoint.held
    assert table.unsaved("b", looked, 1) == [HandBack(["ack.2"])]
    assert table.message(delivery("c", seq=3), 1) == [HandBack(["ack.3"])]
    assert (len(table), table.holding_of) == (0, {})


def test_those_that_others_keep_from_the_batch_for_long_are_handed_back() -> None:
    table = JobTable(JobLimits(patience_s=2.0))
    runs = {rid: started(table, rid)[1] for rid in "abc"}
    table.tokens([token(runs["a"], [1])], 1.5)
    assert [type(each) for each in table.tick(2.5, 3)] == [Save]
    left = table.tick(2.5, 2)
    assert [type(each) for each in left] == [Cut, Save]
    assert left[0] == Cut(runs["b"])
    assert table.holding_of["t"] == 2


def test_a_second_message_of_a_job_is_one_more_handle() -> None:
    table = JobTable(JobLimits())
    claim, run = started(table)
    assert table.message(delivery(seq=4), 0) == []
    store = only(table.tokens([token(run, [1], finish="stop", usage=Usage(1, 1))], 0), Store)
    assert only(table.stored("r", claim, store.result), Settle).handles == ["ack.1", "ack.4"]


class Broker:
    """One job's message and what is kept of it; workers that lose writes, die, drain and wake up late."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kept = Kept(None, 0, None)
        self.results = self.deliveries = self.sequence = 0
        self.acked = False
        self.tables: list[JobTable] = []
        self.pending: list[tuple[JobTable, Action]] = []
        self.runs: dict[str, tuple[JobTable, list[int]]] = {}

    def act(self, table: JobTable, actions: list[Action]) -> None:
        self.pending += [(table, action) for action in actions]

    def deliver(self) -> None:
        table = JobTable(JobLimits(deaths_max=10_000))
        self.tables.append(table)
        self.deliveries += 1
        self.act(table, table.message(delivery(deliveries=self.deliveries, deadline=1e9), 0))

    def perform(self) -> None:
        """One of the pending actions of any worker, in each worker's order."""
        first = {id(table): index for index, (table, _) in reversed(list(enumerate(self.pending)))}
        table, action = self.pending.pop(self.random.choice(sorted(first.values())))
        match action:
            case Look():
                parts = self.kept.checkpoint
                copy = None if parts is None else checkpoint(parts.parts[0].ids, parts.held)
                self.act(table, table.found("r", action.claim, Kept(copy, self.kept.sequence, self.kept.result), 0))
            case Save() if action.last == self.kept.sequence and self.kept.result is None:
                self.sequence += 1
                self.kept = Kept(action.checkpoint, self.sequence, None)
                self.act(table, table.saved("r", action.claim, self.sequence, 0))
            case Save():
                self.act(table, table.lost("r", action.claim))
            case Store():
                if self.kept.result is None:
                    self.results += 1
                    self.kept.result = action.result
                self.act(table, table.stored("r", action.claim, self.kept.result))
            case Settle():
                self.acked = True
            case HandBack():
                self.deliver()
            case Begin():
                self.runs[action.run] = (table, list(action.prefix[0]))
            case Cut():
                self.runs.pop(action.run, None)

    def generate(self) -> None:
        run = self.random.choice(sorted(self.runs))
        table, ids = self.runs[run]
        ids.append(len(ids))
        over = len(ids) >= 8
        event = token(run, [len(ids) - 1], finish="stop" if over else None, usage=Usage(1, 8) if over else None)
        if over:
            del self.runs[run]
        self.act(table, table.tokens([event], 0))

    def fault(self) -> None:
        table = self.random.choice(self.tables)
        kind: Callable[[], None] = self.random.choice(
            [self.deliver, lambda: self.kill(table), lambda: self.drain(table)]
        )
        kind()

    def kill(self, table: JobTable) -> None:
        self.tables.remove(table)
        self.pending = [each for each in self.pending if each[0] is not table]
        self.runs = {run: each for run, each in self.runs.items() if each[0] is not table}
        self.deliver()

    def drain(self, table: JobTable) -> None:
        self.act(table, table.drain())


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_whatever_happens_a_job_has_one_result_and_all_of_its_tokens_in_order(first: int) -> None:
    for seed in range(first, first + 200):
        broker = Broker(seed)
        broker.deliver()
        for step in range(400):
            if step < 60 and broker.random.random() < 0.1:
                broker.fault()
            elif broker.runs and (not broker.pending or broker.random.random() < 0.4):
                broker.generate()
            elif broker.pending:
                broker.perform()
            elif not broker.acked:
                for table in broker.tables:
                    broker.act(table, table.tick(0, 9))
                if not broker.pending:
                    broker.deliver()  # nobody holds it: ack_wait is over
            else:
                break
        assert broker.acked, seed
        assert broker.results == 1
        assert broker.kept.result is not None
        assert broker.kept.result.error is None
        assert broker.kept.result.parts[0].ids == list(range(8)), seed
        assert broker.kept.result.parts[0].text == [f"<{each}>" for each in range(8)]
