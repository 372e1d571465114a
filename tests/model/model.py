"""A randomised model of the wire that drives the production state machines, `Requester` and `ClaimTable`.

The world: one rid, its copies in a work-queue stream, requesters and workers, joined by at-most-once channels that are FIFO
per (sender, receiver, subject). A schedule is a list of integers, each picking one of the actions that are possible, so it
replays and shrinks. Every actor has a clock of its own that may run ahead, so in the chaos phase any timer may fire at any
moment; then faults stop, and a calm phase with a common clock must reach quiescence.

A token is the whole path of choices that led to it (binary, after the number of the choice), so one comparison shows a gap,
a duplicate and a mixture of two generations. `without` takes one rule of the protocol away: the model must then find fault.

    python tests/model/model.py --runs 100000              every rule, a random subset of the faults in each schedule
    python tests/model/model.py --runs 5000 --faults kill  one fault alone
    python tests/model/model.py --mutants 5000             each rule taken away in turn
    python tests/model/model.py --replay 17 [--without X]  one schedule, told step by step
    python tests/model/model.py --shrink mix --without sid a small counter-example
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import msgspec

from shared import actions as asks
from shared.actions import DeadLetter as RequestDeadLetter
from shared.requester import Known, Requester, RequesterLimits, unknown_rid
from shared.wire import (
    Accepted,
    Attach,
    Frame,
    Input,
    Logprob,
    No,
    Ok,
    Release,
    Request,
    Sampling,
    Usage,
    Wait,
    digest,
)
from workers import claims
from workers.claims import ClaimLimits, ClaimTable, Delivery
from workers.engine.request import TokenEvent
from workers.history import History, Match, positions_of

RID = "rid"
LENGTHS = (4, 3)  # tokens of a complete choice 0 and 1
FAULTS_MAX = 6  # in one schedule; twice as many where only one kind of fault is on
DEATHS_MAX = 4
FAR = 1e9  # a deadline that only its fault reaches
STEP_S = 0.5  # of the calm phase
ROUNDS_MAX = 240
REQUESTERS_MAX = 3

FAULTS = (
    "kill stop hang loss broker rdeath move samehost second drain false503 cancel deadline wfail ackwait nak pubfail "
    "reconnect"
).split()
ENDINGS = ("cancel", "deadline")  # end a schedule early, so they are on in fewer
RULES = {
    "sid": "frames are fenced by (sid, claim)",
    "digest": "attach carries the prefix, and the worker compares it",
    "gone": "publish again only after the broker says that the message is gone",
    "body": "whoever attaches reads the body, so it too can publish again",
    "stray": "a frame of a finished or foreign stream is answered with release",
    "resend": "accepted and terminal frames are repeated until answered",
    "poison": "only workers that answered and did not take leave count as killed",
    "seek": "an attach that a known worker does not answer is followed by a broadcast",
    "gap": "an index beyond the position is a gap",
    "repeat": "a finish is delivered once",
}
ERRORS = {  # a terminal error that is no violation when its fault is on
    "cancelled": ("cancel", "move", "samehost"),
    "queue_deadline": ("deadline",),
    "generation_deadline": ("deadline", "wfail"),
    "engine_failed": ("wfail",),
}


class Violation(Exception):
    """The protocol broke a promise; the text before the colon is its kind."""


class Message(msgspec.Struct):
    """A message in REQ."""

    reply: str
    resume: bool
    ready: bool = True
    deliveries: int = 0


class Worker:
    """A worker process: its table, and an engine that is a set of runs."""

    def __init__(self, name: str, limits: ClaimLimits) -> None:
        self.name = name
        self.table = ClaimTable(name, limits)
        self.runs: dict[str, list[list[int]]] = {}
        self.finished: dict[str, set[int]] = {}
        self.stopped = False
        self.ahead = 0.0  # its clock less the world's


class Node:
    """A requester process, one requester in it and what that one's client has seen."""

    def __init__(self, name: str, address: str, log: list[list[int]], leid: bool) -> None:
        self.name = name
        self.address = address
        self.log = log
        self.leid = leid  # came with Last-Event-ID
        self.alive = True
        self.client = True  # False: it went elsewhere
        self.had = not leid  # the body was to be had
        self.finished: set[int] = set()
        self.usage: Usage | None = None
        self.end: str | None = None
        self.publishing: str | None = None  # the copy whose publish ack is awaited
        self.ahead = 0.0
        self.requester: Requester


# -- production code with a rule taken away ----------------------------------------------------------------------------


class Unfenced(Requester):
    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        if not self.ended and self.claim is not None:
            frame = msgspec.structs.replace(frame, sid=self.sid, claim=self.claim)
        return super().frame(worker, frame, now)


class Silent(Requester):
    def _stray(self, worker: str, item: Frame | Ok) -> list[asks.Action]:
        return []


class Suspicious(Requester):
    def no_responders(self, worker: str, now: float) -> list[asks.Action]:
        self._served.add(worker)
        return super().no_responders(worker, now)


class Gapless(Requester):
    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        if not self.ended and frame.sid == self.sid and self._digest is None:
            frame = msgspec.structs.replace(frame, index=min(frame.index, self._choices[frame.choice].next))
        return super().frame(worker, frame, now)


class Repeating(Requester):
    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        actions = super().frame(worker, frame, now)
        mine = frame.sid == self.sid and frame.finish is not None
        if mine and not any(isinstance(action, asks.Deliver) and action.finish for action in actions):
            actions.insert(0, asks.Deliver(frame.choice, [], [], None, frame.finish, None))
        return actions


class ByPosition(History):
    def match(self, attach: Attach) -> Match:
        short = any(len(choice.ids) < at for choice, at in zip(self.choices, positions_of(attach), strict=True))
        return Match.SHORTER if short else Match.EXTENDS


MUTANTS: dict[str, type[Requester]] = {
    "sid": Unfenced,
    "stray": Silent,
    "poison": Suspicious,
    "gap": Gapless,
    "repeat": Repeating,
}


class World:
    """One schedule: `run` raises Violation, or returns what happened, counted."""

    def __init__(self, ints: list[int], faults: Iterable[str], without: str = "", trace: bool = False) -> None:
        self.ints, self.faults, self.without, self.trace = ints, set(faults), without, trace
        self.net: dict[tuple[str, str, str], list[Any]] = {}
        self.workers: dict[str, Worker] = {}
        self.nodes: dict[str, Node] = {}
        self.homes: dict[str, Node] = {}  # address -> the requester of the rid in that process
        self.messages: dict[int, Message] = {}
        self.published: dict[str, int] = {}  # Msg-Id -> seq, the dedupe window
        self.now = 1000.0
        self.budget = FAULTS_MAX if len(self.faults) > 1 else 2 * FAULTS_MAX
        self.deaths = 0
        self.stats: Counter[str] = Counter()
        shape = ints[0] if ints else 0
        self.choices = 2 if shape % 3 == 0 else 1
        self.logprobs = shape // 3 % 2 == 0
        self.claim_limits = ClaimLimits(
            resend_s=FAR * 10 if without == "resend" else 1.0,
            orphan_grace_s=3.0,
            history_kept_s=6.0,
            history_tokens_max=100,
        )
        self.new_worker()
        self.new_worker()
        first = self.new_node("R1", [[] for _ in range(self.choices)], publisher=True)
        self.publish(first, "R1.0")

    def say(self, text: str) -> None:
        if self.trace:
            print("   ", text)

    # -- actors --------------------------------------------------------------------------------------------------------

    def new_worker(self) -> None:
        name = f"W{len(self.workers) + self.stats['workers gone'] + 1}"
        self.workers[name] = Worker(name, self.claim_limits)

    def new_node(
        self,
        name: str,
        log: list[list[int]],
        publisher: bool = False,
        leid: bool = False,
        seq: int | None = None,
        address: str = "",
    ) -> Node:
        node = Node(name, address or f"tok.ingress.{name}", log, leid)
        known = Known(next=[len(ids) for ids in log], digest=[digest(ids) for ids in log]) if any(log) else None
        if leid:
            node.had = seq in self.messages
        limits = RequesterLimits(
            attach_timeout_s=FAR * 10 if self.without == "seek" else 1.0,
            ack_wait_s=1.0,
            orphan_grace_s=3.0,
            deaths_max=DEATHS_MAX,
            queue_deadline=self.now + FAR,
            generation_s=FAR,
        )
        node.requester = MUTANTS.get(self.without, Requester)(
            RID,
            node.address,
            self.choices,
            self.now,
            limits,
            publisher=publisher,
            has_body=not leid or (node.had and self.without != "body"),
            keyed="second" in self.faults,
            resumable=bool(self.faults & {"move", "samehost", "rdeath"}),
            seq=seq,
            known=known,
        )
        self.nodes[name] = self.homes[node.address] = node
        return node

    def time_of(self, actor: Worker | Node) -> float:
        return self.now + actor.ahead

    # -- the network ---------------------------------------------------------------------------------------------------

    def send(self, source: str, target: str, channel: str, message: Any) -> None:
        self.net.setdefault((source, target, channel), []).append(message)

    def pop(self, key: tuple[str, str, str], how: str = "") -> Any:
        queue = self.net[key]
        message = queue.pop(0)
        if not queue:
            del self.net[key]
        self.say(f"{how}{key[0]} -> {key[1]}: {message}")
        return message

    def deliver(self, key: tuple[str, str, str]) -> None:
        source, target, channel = key
        message = self.pop(key)
        if target == "broker":
            self.at_broker(source, message)
        elif target in self.workers:
            self.at_worker(self.workers[target], channel, message)
        elif target in self.homes:
            self.at_address(target, channel, source, message)
        elif channel == "ctl" and not (isinstance(message, Release) and message.done):
            self.send("broker", message.reply, "503", target)  # no worker of that name any more

    def at_broker(self, source: str, message: Any) -> None:
        match message:
            case ("+ACK", seq):
                if self.messages.pop(seq, None) is not None:
                    live = [node for node in self.nodes.values() if node.alive and node.client and node.end is None]
                    self.stats["acked under a live requester"] += any(node.requester.seq == seq for node in live)
            case ("-NAK", seq):
                if seq in self.messages:
                    self.messages[seq].ready = True  # by anybody: redelivered at once
            case ("get", seq):
                stored = seq in self.messages and self.without != "gone"
                self.send("broker", source, "api", ("state", seq, stored))
            case ("delete", seq):
                self.messages.pop(seq, None)
            case ("publish", message_id):
                self.send("broker", source, "api", ("published", message_id, self.store(source, message_id)))

    def store(self, reply: str, message_id: str) -> int:
        """A copy under the same Msg-Id is not stored again."""
        if message_id not in self.published:
            seq = self.published[message_id] = len(self.published) + 1
            resume = not message_id.endswith(".0")
            self.messages[seq] = Message(reply, resume)
            self.stats["published again"] += resume
        return self.published[message_id]

    def publish(self, node: Node, message_id: str) -> None:
        node.publishing = message_id
        self.send(node.address, "broker", "js", ("publish", message_id))

    def hand_out(self, seq: int, pick: int) -> None:
        name = list(self.workers)[pick % len(self.workers)]  # the open pull of a stopped worker takes messages too
        message = self.messages[seq]
        message.ready = False
        message.deliveries += 1
        delivery = Delivery(
            request=Request(RID, "m", "v1", Input(prompt="p"), Sampling(n=self.choices)),
            tenant="t",
            seq=seq,
            handle=f"ack.{seq}.{message.deliveries}",
            reply=message.reply,
            deliveries=message.deliveries,
            resume=message.resume,
            generation_s=FAR,
        )
        self.send("broker", name, "pull", delivery)

    def held(self, seq: int) -> bool:
        """In-progress from any delivery counts."""
        wanted = f"ack.{seq}."
        tables = [worker.table for worker in self.workers.values() if not worker.stopped]
        return any(handle.startswith(wanted) for table in tables for handle in table.handles())

    # -- workers -------------------------------------------------------------------------------------------------------

    def at_worker(self, worker: Worker, channel: str, message: Any) -> None:
        table, now = worker.table, self.time_of(worker)
        match message:
            case Delivery():
                actions = table.message(message, now)
            case Attach():
                actions = table.attach(message, channel == "broadcast", now)
            case Release():
                actions = table.release(message, now)
            case _:
                actions = table.no_responders(message, now)
        self.perform(worker, actions)

    def perform(self, worker: Worker, actions: list[claims.Action]) -> None:
        for action in actions:
            match action:
                case claims.Send(reply, item):
                    self.send(worker.name, reply, "tok", item)
                case claims.Ack(handle):
                    self.send(worker.name, "broker", "js", ("+ACK", int(handle.split(".")[1])))
                case claims.Nak(handle):
                    self.send(worker.name, "broker", "js", ("-NAK", int(handle.split(".")[1])))
                case claims.Start():
                    worker.runs[action.run] = [list(ids) for ids in action.prefix]
                    worker.finished[action.run] = set()
                case claims.Abort(run):
                    worker.runs.pop(run, None)
                case _:
                    raise Violation(f"false dead letter: {action}")

    def generate(self, worker: Worker, pick: int) -> None:
        """One token of one choice, or only its finish."""
        run = list(worker.runs)[pick % len(worker.runs)]
        ids, done = worker.runs[run], worker.finished[run]
        open_choices = [choice for choice in range(self.choices) if choice not in done]
        choice = open_choices[pick // 7 % len(open_choices)]
        new: list[int] = []
        if len(ids[choice]) < LENGTHS[choice]:
            before = ids[choice][-1] if ids[choice] else choice + 1
            new = [before * 2 + pick // 31 % 2]
            ids[choice] += new
        complete = len(ids[choice]) >= LENGTHS[choice] and (not new or pick // 67 % 2 == 0)
        if complete:
            done.add(choice)
        last = len(done) == self.choices
        event = TokenEvent(
            key=run,
            choice=choice,
            ids=new,
            text=[str(token) for token in new],
            logprobs=[Logprob(token, -1.0, b"") for token in new] if self.logprobs else None,
            finish="stop" if complete else None,
            usage=Usage(3, sum(map(len, ids))) if last else None,
        )
        if last:
            del worker.runs[run]
        self.perform(worker, worker.table.tokens([event], self.time_of(worker)))

    def tick_worker(self, worker: Worker, ahead: float = 0.0) -> None:
        worker.ahead += ahead
        self.perform(worker, worker.table.tick(self.time_of(worker)))

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.name]
        self.stats["workers gone"] += 1

    # -- requesters ----------------------------------------------------------------------------------------------------

    def at_address(self, address: str, channel: str, source: str, item: Any) -> None:
        node = self.homes[address]
        requester, now = node.requester, self.time_of(node)
        if not node.alive:
            if channel == "tok":
                self.send("broker", source, "503", address)
            return
        if node.end is not None and channel != "api":
            if channel == "tok" and self.without != "stray":
                self.ask(node, unknown_rid(source, item, address))
            return
        match item:
            case Accepted():
                actions = requester.accepted(source, item, now)
            case Frame():
                actions = requester.frame(source, item, now)
            case Ok():
                actions = requester.ok(source, item, now)
            case Wait():
                actions = requester.wait(source, item, now)
            case No():
                actions = requester.no(source, item, now)
            case ("state", seq, stored):
                node.had = node.had or stored
                actions = requester.message_state(seq, stored, now)
            case ("published", message_id, seq):
                if node.publishing != message_id:
                    return
                node.publishing = None
                actions = requester.published(seq, now)
            case worker:
                actions = requester.no_responders(worker, now)
        if self.without == "body" and node.leid:
            requester.has_body = False
        self.ask(node, actions)

    def ask(self, node: Node, actions: list[asks.Action]) -> None:
        for action in actions:
            if node.end is not None and not isinstance(action, asks.SendRelease | asks.DeleteMessage):
                raise Violation(f"two terminals: {action} after the end")
            match action:
                case asks.SendAttach(None, attach):
                    for name in self.workers:
                        self.send(node.address, name, "broadcast", attach)
                case asks.SendAttach(worker, attach):
                    self.send(node.address, str(worker), "ctl", attach)
                case asks.SendRelease(worker, release):
                    self.send(node.address, worker, "ctl", release)
                case asks.Nak(ack_subject):
                    self.send(node.address, "broker", "js", ("-NAK", int(ack_subject.split(".")[1])))
                case asks.CheckMessage(seq):
                    self.send(node.address, "broker", "js", ("get", seq))
                case asks.Republish(k):
                    if node.requester.seq in self.messages:
                        raise Violation(f"copy: {node.name} publishes again while {node.requester.seq} is stored")
                    self.publish(node, f"{node.name}.{k}")  # each requester has Msg-Ids of its own
                case asks.DeleteMessage(seq):
                    self.send(node.address, "broker", "js", ("delete", seq))
                case RequestDeadLetter():
                    self.stats["dead letters"] += 1
                case asks.Deliver():
                    self.deliver_tokens(node, action)
                case asks.End(error):
                    self.finish(node, error.code if error is not None else "complete")

    def deliver_tokens(self, node: Node, part: asks.Deliver) -> None:
        log = node.log[part.choice]
        if not node.client:
            raise Violation(f"delivered to a client that left: {node.name} {part}")
        if part.choice in node.finished and (part.ids or part.finish):
            raise Violation(f"repeat: {node.name} has finished choice {part.choice}, then {part}")
        if part.text != [str(token) for token in part.ids]:
            raise Violation(f"text: {part}")
        if self.logprobs and part.ids and [entry.id for entry in part.logprobs or []] != part.ids:
            raise Violation(f"logprobs: {part}")
        for token in part.ids:
            if token >> 1 != (log[-1] if log else part.choice + 1):
                raise Violation(f"mix: {node.name} has {log}, next token {token}")
            log.append(token)
        if part.finish is not None:
            if len(log) != LENGTHS[part.choice]:
                raise Violation(f"truncated: {node.name} choice {part.choice} complete at {log}")
            node.finished.add(part.choice)
        node.usage = part.usage or node.usage

    def finish(self, node: Node, how: str) -> None:
        node.end = how
        requester = node.requester
        self.say(f"{node.name} ends: {how} {node.log}")
        self.stats[f"end {how}"] += 1
        if how == "complete":
            bad = node.client and (len(node.finished) != self.choices or node.usage is None)
        elif how == "request_poisoned":
            bad = self.deaths < DEATHS_MAX
        elif how == "stream_gone":
            bad = node.had
        elif how == "diverged":
            bad = requester._digest is None
        else:
            bad = not self.faults & set(ERRORS.get(how, ()))
        if bad:
            raise Violation(f"false {how}: {self.deaths} deaths, {node.name} with {node.log}")

    def tick_node(self, node: Node, now: float) -> None:
        node.ahead = max(node.ahead, now - self.now)
        self.ask(node, node.requester.tick(self.time_of(node)))

    # -- the schedule --------------------------------------------------------------------------------------------------

    def listening(self, key: tuple[str, str, str]) -> bool:
        return key[1] not in self.workers or not self.workers[key[1]].stopped

    def possible(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        faults = self.faults if self.budget > 0 else set()
        for key in self.net:
            if self.listening(key):
                found += [("deliver", key)] * 3
        if "loss" in faults and self.net:
            found += [("lose", None)] * 2
        if "broker" in faults:
            found.append(("broker", None))
        for seq, message in self.messages.items():
            if message.ready:
                found += [("hand out", seq)] * 2
            elif "ackwait" in faults or not self.held(seq):
                found.append(("ackwait", seq))
            if not message.ready and "nak" in faults:
                found.append(("nak", seq))
        for worker in self.workers.values():
            found += self.possible_of_worker(worker, faults)
        for node in self.nodes.values():
            if node.alive and node.end is None:
                found += self.possible_of_node(node, faults)
        return found

    def possible_of_worker(self, worker: Worker, faults: set[str]) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [(name, worker) for name in ("kill", "drain") if name in faults]
        if worker.stopped:
            return [*found, ("continue", worker)]
        if "stop" in faults or "hang" in faults:
            found.append(("stop", worker))
        if worker.runs:
            found += [("generate", worker)] * 2
            if "wfail" in faults:
                found.append(("wfail", worker))
        if len(worker.table):
            found.append(("resend", worker))
            claim = worker.table._claims[RID]
            if claim.orphan_at is not None:
                found.append(("grace", worker))
            if "false503" in faults and claim.subscribers:
                found.append(("false503", worker))
        elif worker.table._kept:
            found.append(("forget", worker))
        return found

    def possible_of_node(self, node: Node, faults: set[str]) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [("tick", node)]
        if node.publishing is not None:
            found.append(("publish", node))
            if "pubfail" in faults and not node.publishing.endswith(".0"):
                found.append(("pubfail", node))
        if "false503" in faults and node.requester.worker is not None:
            found.append(("false503", node))
        if "reconnect" in faults:
            found.append(("reconnect", node))
        if node.client:
            found += [(name, node) for name in ("cancel", "deadline") if name in faults]
            if len(self.nodes) < REQUESTERS_MAX and node.requester.seq is not None:
                found += [(name, node) for name in ("move", "samehost", "second") if name in faults]
                if "rdeath" in faults:
                    found += [("die", node), ("die+move", node)]
        return found

    def step(self, name: str, target: Any, pick: int) -> None:
        if self.trace and name != "deliver":
            print(f"* {name} {getattr(target, 'name', target)}")
        self.now += 0.001
        forced = name == "ackwait" and self.held(target)
        harmless = "deliver,hand out,ackwait,continue,generate,resend,grace,forget,tick,publish".split(",")
        if forced or name not in harmless:
            self.budget -= 1
        self.deaths += name in ("kill", "lose", "broker", "false503")
        getattr(self, "do_" + name.replace(" ", "_").replace("+", "_and_"))(target, pick)

    def do_deliver(self, key: tuple[str, str, str], pick: int) -> None:
        self.deliver(key)

    def do_lose(self, _: None, pick: int) -> None:
        self.pop(list(self.net)[pick % len(self.net)], "lost: ")

    def do_broker(self, _: None, pick: int) -> None:
        """The broker restarts: core messages go, the stream stays, its last deliveries may be forgotten."""
        for key in list(self.net):
            if key[2] in ("tok", "pull") or pick >> len(key[2]) & 1:
                del self.net[key]
        for message in self.messages.values():
            if not message.ready:
                message.ready = True
                message.deliveries = max(0, message.deliveries - (pick & 1))

    def do_hand_out(self, seq: int, pick: int) -> None:
        self.hand_out(seq, pick)

    def do_ackwait(self, seq: int, pick: int) -> None:
        self.messages[seq].ready = True

    do_nak = do_ackwait

    def do_kill(self, worker: Worker, pick: int) -> None:
        self.remove(worker)
        self.new_worker()

    def do_drain(self, worker: Worker, pick: int) -> None:
        if not worker.stopped and pick % 2 and not worker.table.draining:
            worker.table.drain()  # it will stop later
        else:
            self.perform(worker, worker.table.stop())
            if worker.runs:
                raise Violation(f"leak: {worker.name} stopped with {worker.runs}")
            self.remove(worker)
        self.new_worker()

    def do_stop(self, worker: Worker, pick: int) -> None:
        worker.stopped = True

    def do_continue(self, worker: Worker, pick: int) -> None:
        worker.stopped = False

    def do_generate(self, worker: Worker, pick: int) -> None:
        self.generate(worker, pick)

    def do_wfail(self, worker: Worker, pick: int) -> None:
        if pick % 3 == 0:
            self.tick_worker(worker, FAR + 10)  # its own deadline
            return
        run = next(iter(worker.runs))
        del worker.runs[run]
        event = TokenEvent(key=run, choice=0, error=("engine_failed", "it raised"))
        self.perform(worker, worker.table.tokens([event], self.time_of(worker)))

    def do_resend(self, worker: Worker, pick: int) -> None:
        self.tick_worker(worker, 1.0)

    def do_grace(self, worker: Worker, pick: int) -> None:
        self.tick_worker(worker, self.claim_limits.orphan_grace_s)

    def do_forget(self, worker: Worker, pick: int) -> None:
        self.tick_worker(worker, self.claim_limits.history_kept_s)

    def do_false503(self, target: Worker | Node, pick: int) -> None:
        if isinstance(target, Node):
            self.ask(target, target.requester.no_responders(str(target.requester.worker), self.time_of(target)))
            return
        for reply in list(target.table._claims[RID].subscribers):
            self.perform(target, target.table.no_responders(reply, self.time_of(target)))

    def do_tick(self, node: Node, pick: int) -> None:
        due = node.requester.next_tick()
        if due is not None and due < self.now + FAR / 2:
            self.tick_node(node, due)

    def do_publish(self, node: Node, pick: int) -> None:
        if node.publishing is not None:
            self.publish(node, node.publishing)

    def do_pubfail(self, node: Node, pick: int) -> None:
        node.publishing = None
        self.ask(node, node.requester.publish_failed(asks.HeadraceError("no ack"), self.time_of(node)))

    def do_reconnect(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.reconnected(self.time_of(node)))

    def do_cancel(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.cancel(self.time_of(node)))

    def do_deadline(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.tick(self.time_of(node) + 2 * FAR))

    def do_second(self, node: Node, pick: int) -> None:
        """Another caller with the same idempotency key: its record names the first sequence."""
        log: list[list[int]] = [[] for _ in range(self.choices)]
        self.new_node(f"R{len(self.nodes) + 1}", log, seq=self.published["R1.0"])

    def do_die(self, node: Node, pick: int) -> None:
        node.alive = False

    def do_die_and_move(self, node: Node, pick: int) -> None:
        node.alive = False
        self.resume_elsewhere(node, "")

    def do_move(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.client_left(self.time_of(node)))
        self.resume_elsewhere(node, "")

    def do_samehost(self, node: Node, pick: int) -> None:
        """The client comes back to the process it left: the new requester takes the old one's place."""
        self.ask(node, node.requester.cancel(self.time_of(node)))
        self.resume_elsewhere(node, node.address)

    def resume_elsewhere(self, node: Node, address: str) -> None:
        node.client = False
        log = [list(ids) for ids in node.log]
        self.new_node(f"R{len(self.nodes) + 1}", log, leid=True, seq=node.requester.seq, address=address)

    def run(self) -> Counter[str]:
        for number in self.ints:
            found = self.possible()
            if not found:
                break
            self.step(*found[number % len(found)], number // 997)
        self.calm()
        return self.stats

    # -- the calm phase --------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Faults are over: everything must end by itself."""
        self.say("--- calm")
        for worker in self.workers.values():  # with "hang" a stopped worker never comes back
            worker.stopped = worker.stopped and "hang" in self.faults
        if all(worker.stopped for worker in self.workers.values()):
            self.new_worker()
        rng = random.Random(7)
        for turn in range(ROUNDS_MAX):
            self.now += STEP_S
            self.calm_network()
            self.calm_broker(rng)
            self.calm_workers(rng, turn)
            for node in list(self.nodes.values()):
                if node.alive and node.end is None:
                    if node.publishing is not None and turn % 4 == 0:
                        self.publish(node, node.publishing)
                    self.tick_node(node, 0.0)
            if self.quiet():
                return
        waiting = [(node.name, node.log) for node in self.nodes.values() if node.alive and node.end is None]
        busy = [worker.name for worker in self.workers.values() if not worker.stopped and len(worker.table)]
        raise Violation(f"stuck: {waiting}" if waiting else f"leak: queue {list(self.messages)}, workers {busy}")

    def calm_network(self) -> None:
        for _ in range(400):
            key = next((key for key in self.net if self.listening(key)), None)
            if key is None:
                return
            self.deliver(key)
        raise Violation("livelock: messages never end")

    def calm_broker(self, rng: random.Random) -> None:
        for seq, message in list(self.messages.items()):
            if not message.ready and not self.held(seq):
                message.ready = True
            elif message.ready:
                self.hand_out(seq, rng.getrandbits(8))

    def calm_workers(self, rng: random.Random, turn: int) -> None:
        for worker in [worker for worker in self.workers.values() if not worker.stopped]:
            for _ in range(len(worker.runs)):
                self.generate(worker, rng.getrandbits(16))
            self.tick_worker(worker)
            if worker.table.draining and turn == 8:
                self.do_drain(worker, 0)

    def quiet(self) -> bool:
        live = [worker for worker in self.workers.values() if not worker.stopped]
        waiting = any(node.alive and node.end is None for node in self.nodes.values())
        if waiting or self.messages or any(len(worker.table) for worker in live):
            return False
        if any(worker.runs for worker in live):
            raise Violation(f"leak: runs {[worker.runs for worker in live]}")
        return True


class Killer(World):
    """The request kills every worker that starts it for a requester: the prefill ends the process."""

    def perform(self, worker: Worker, actions: list[claims.Action]) -> None:
        super().perform(worker, actions)
        claim = worker.table._claims.get(RID)
        if worker.name in self.workers and worker.runs and claim is not None and claim.subscribers:
            self.do_kill(worker, 0)
            self.deaths += 1

    def generate(self, worker: Worker, pick: int) -> None:
        pass


# -- campaigns ---------------------------------------------------------------------------------------------------------


def schedule(seed: int, faults: Iterable[str] = FAULTS) -> tuple[list[int], list[str]]:
    """The integers and the faults of a seed."""
    rng = random.Random(seed)
    chosen = list(faults)
    if len(chosen) > 2:
        chosen = [fault for fault in chosen if rng.random() < (0.12 if fault in ENDINGS else 0.45)]
    return [rng.getrandbits(40) for _ in range(rng.choice((12, 20, 30, 45, 70)))], chosen


def check(ints: list[int], faults: Iterable[str], without: str = "", trace: bool = False) -> tuple[str, Counter[str]]:
    """The violation of one schedule ("" for none) and what happened."""
    history = ByPosition if without == "digest" else History
    try:
        with mock.patch.object(claims, "History", history):
            return "", World(ints, faults, without, trace).run()
    except Violation as violation:
        return str(violation), Counter()


def shrink(ints: list[int], faults: list[str], without: str, kind: str) -> tuple[list[int], list[str]]:
    """Drop faults, then choices, as long as the same kind of violation remains."""

    def bad(ints: list[int], faults: list[str]) -> bool:
        return check(ints, faults, without)[0].split(":")[0] == kind

    for fault in list(faults):
        fewer = [other for other in faults if other != fault]
        if bad(ints, fewer):
            faults = fewer
    size = len(ints) + 1
    while len(ints) < size:
        size = len(ints)
        for at in reversed(range(size)):
            if bad(ints[:at] + ints[at + 1 :], faults):
                ints = ints[:at] + ints[at + 1 :]
    return ints, faults


def campaign(first: int, runs: int, faults: Iterable[str] = FAULTS, without: str = "") -> tuple[dict[str, list[int]], Counter[str]]:
    """The seeds of each kind of violation, and what happened over all."""
    found: dict[str, list[int]] = {}
    stats: Counter[str] = Counter()
    for seed in range(first, first + runs):
        violation, happened = check(*schedule(seed, faults), without)
        stats.update(happened)
        if violation:
            found.setdefault(violation.split(":")[0], []).append(seed)
    return found, stats


MUTANT_FAULTS = {"poison": ["drain"]}  # where the rule is hardly needed otherwise


def report(label: str, first: int, runs: int, faults: list[str], without: str = "") -> bool:
    """Run a campaign and print it; whether it was clean."""
    begin = time.monotonic()
    found, stats = campaign(first, runs, faults, without)
    kinds = ", ".join(f"{kind} {len(seeds)} (seed {seeds[0]})" for kind, seeds in sorted(found.items())) or "0"
    print(f"{label}: seeds {first}..{first + runs - 1}, {time.monotonic() - begin:.0f} s, violations {kinds}", flush=True)
    print("   ", ", ".join(f"{name} {count}" for name, count in sorted(stats.items())), flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 2000), ("first", 1), ("mutants", 0), ("replay", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--each", action="store_true", help="each fault alone")
    parser.add_argument("--without", default="", choices=["", *RULES])
    parser.add_argument("--shrink", default="", help="the kind of violation to find a small schedule of")
    options = parser.parse_args()
    faults = options.faults.split(",")
    if options.replay:
        print(check(*schedule(options.replay, faults), options.without, trace=True)[0] or "no violation")
        return 0
    if options.mutants:
        for rule in RULES:
            report(f"without {rule}", options.first, options.mutants, MUTANT_FAULTS.get(rule, faults), rule)
        return 0
    if options.shrink:
        found, _ = campaign(options.first, options.runs, faults, options.without)
        small = [shrink(*schedule(seed, faults), options.without, options.shrink) for seed in found[options.shrink][:5]]
        ints, faults = min(small, key=lambda case: (len(case[1]), len(case[0])))
        print(faults, "\n", check(ints, faults, options.without, trace=True)[0])
        return 0
    if options.each:
        return int(not all([report(f"only {fault}", options.first, options.runs, [fault]) for fault in faults]))
    return int(not report("all rules", options.first, options.runs, faults, options.without))


if __name__ == "__main__":
    raise SystemExit(main())
