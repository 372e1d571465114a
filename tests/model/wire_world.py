"""The world of the model: a broker, requesters and workers that run the production state machines, and what must hold.

Its actors are joined by at-most-once channels that are FIFO per (sender, receiver, subject). A token is the whole path of
choices that led to it, and the version that it came of, after the number of the choice, so one comparison shows a gap, a
duplicate and a mixture of two generations or versions.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from mutants import EVERY, Rules

from shared import actions as asks
from shared.errors import NoReplicaForPin
from shared.requester import Requester, unknown_rid
from shared.terms import Known, RequesterLimits
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
    copy_id,
    digest,
)
from workers import claims
from workers.claims import ClaimLimits, ClaimTable, Delivery
from workers.engine.request import TokenEvent

RID = "rid"
FIRST = RID  # the Msg-Id of the first publish
LASTING = "again"  # the channel of what its sender repeats until it has been heard
OLD, NEW = "old", "new"  # versions: what is withdrawn, if it is, and what takes its requests
MOVED = copy_id(RID, NEW, 0)  # the Msg-Id of the copy of a request that moves
LENGTHS = ((4, 3), (7, 2))  # tokens of a complete choice 0 and 1: one pair in each schedule
FAULTS_MAX = 6  # in one schedule; twice as many where only one kind of fault is on
DEATHS_MAX = 4
FAR = 1e9  # a deadline that only its fault reaches
ERRORS = {  # a terminal error that is no violation when its fault is on
    "cancelled": ("cancel", "move", "revoke"),
    "queue_deadline": ("deadline",),
    "generation_deadline": ("deadline", "wfail"),
    "engine_failed": ("wfail",),
    "bus_unavailable": ("pubfail",),
}


class Violation(Exception):
    """The protocol broke a promise; the text before the colon is its kind."""


class Message(msgspec.Struct):
    """A message in REQ."""

    reply: str
    resume: bool
    version: str
    ready: bool = True
    deliveries: int = 0


class Worker:
    """A worker process: its table, and an engine that is a set of runs."""

    def __init__(self, name: str, version: str, table: ClaimTable) -> None:
        self.name = name
        self.version = version
        self.table = table
        self.runs: dict[str, list[list[int]]] = {}
        self.untold: set[str] = set()  # runs that have not told the text of their prefix
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
        self.had_before = [len(ids) for ids in log]  # what the client has of an earlier stream
        self.at = list(self.had_before)  # where the next delivery begins
        self.had = not leid  # the body was to be had
        self.finished: set[int] = set()
        self.usage: Usage | None = None
        self.end: str | None = None
        self.publishing: str | None = None  # the copy whose publish ack is awaited
        self.ahead = 0.0
        self.knows = False  # that the version was withdrawn
        self.requester: Requester


class World:
    """One rid, its copies in the stream, and everybody who deals with it under `rules`."""

    def __init__(
        self,
        ints: list[int],
        faults: Iterable[str],
        rules: Rules = EVERY,
        trace: bool = False,
    ) -> None:
        self.ints, self.faults, self.rules, self.without, self.trace = ints, set(faults), rules, rules.broker, trace
        self.net: dict[tuple[str, str, str], list[Any]] = {}
        self.workers: dict[str, Worker] = {}
        self.nodes: dict[str, Node] = {}
        self.homes: dict[str, Node] = {}  # address -> the requester of the rid in that process
        self.messages: dict[int, Message] = {}
        self.published: dict[str, int] = {}  # Msg-Id -> seq, the dedupe window
        self.now = 1000.0
        self.budget = FAULTS_MAX if len(self.faults) > 1 else 2 * FAULTS_MAX
        self.deaths = 0
        self.billed: set[str] = set()  # outcomes
        self.withdrawn = False
        self.stats: Counter[str] = Counter()
        shape = ints[0] if ints else 0
        self.choices = 2 if shape % 3 == 0 else 1
        self.logprobs = shape // 3 % 2 == 0
        self.lengths = LENGTHS[shape // 6 % 2]
        self.steady = shape // 12 % 2 == 0  # generating anew gives the same tokens
        self.by_ids = shape // 24 % 3 == 0  # who takes over has the ids, not only a digest of them
        self.movable = shape // 72 % 4 != 0  # the version was chosen by weights
        self.claim_limits = ClaimLimits(
            resend_s=FAR * 10 if self.without == "resend" else 1.0,
            orphan_grace_s=3.0,
            history_kept_s=6.0,
            history_tokens_max=100,
        )
        rolls = "withdraw" in self.faults
        self.empty = rolls and shape // 288 % 4 == 0  # the version has no worker and gets none
        if not self.empty:
            self.new_worker(OLD)
            self.new_worker(OLD)
        if rolls:
            self.new_worker(NEW)
        first = self.new_node("R1", [[] for _ in range(self.choices)], publisher=True)
        self.publish(first, FIRST)

    # -- actors --------------------------------------------------------------------------------------------------------

    def new_worker(self, version: str) -> None:
        name = f"W{len(self.workers) + self.stats['workers gone'] + 1}"
        self.workers[name] = Worker(name, version, self.rules.table(name, self.claim_limits))

    def new_node(
        self,
        name: str,
        log: list[list[int]],
        publisher: bool = False,
        leid: bool = False,
        seq: int | None = None,
        version: str = OLD,
    ) -> Node:
        node = Node(name, f"tok.ingress.{name}", log, leid)
        position = Known(next=[len(ids) for ids in log], digest=[digest(ids) for ids in log])
        known = Known(ids=log) if self.by_ids else position
        if leid:
            node.had = seq in self.messages
            if not self.by_ids:
                node.at = [0 for _ in log]
        limits = RequesterLimits(
            silence_s=FAR * 10 if self.without == "ping" else 0.5,
            attach_timeout_s=FAR * 10 if self.without == "seek" else 1.0,
            ack_wait_s=1.0,
            orphan_grace_s=3.0,
            found_s=2.0,
            unserved_max_s=4.0,
            deaths_max=DEATHS_MAX,
            queue_deadline=self.now + FAR,
            generation_s=FAR,
        )
        node.requester = self.rules.requester(
            RID,
            node.address,
            self.choices,
            self.now,
            limits,
            publisher=publisher,
            has_body=not leid or (node.had and self.without != "body"),
            keyed=bool(self.faults & {"second", "twice"}),
            resumable=bool(self.faults & {"move", "rdeath"}),
            seq=seq,
            known=None if publisher else known,
            version=version,
            movable=self.movable,
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
        if self.trace:  # what is printed is made for it only
            print(f"    {how}{key[0]} -> {key[1]}: {message}")
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
            case ("publish", message_id, version):
                known = message_id in self.published
                seq = self.store(source, message_id, version)
                self.send("broker", source, "api", ("published", message_id, seq, known))

    def store(self, reply: str, message_id: str, version: str) -> int:
        """A copy under the same Msg-Id is not stored again."""
        if message_id not in self.published:
            seq = self.published[message_id] = len(self.published) + 1
            resume = message_id != FIRST
            self.messages[seq] = Message(reply, resume, version)
            self.stats["published again"] += resume
            self.stats["moved"] += message_id == MOVED
        return self.published[message_id]

    def publish(self, node: Node, message_id: str) -> None:
        node.publishing = message_id
        self.send(node.address, "broker", "js", ("publish", message_id, node.requester.version))

    def hand_out(self, seq: int, pick: int) -> None:
        message = self.messages[seq]
        names = self.serving(message.version)
        if not names:
            return
        name = names[pick % len(names)]  # the open pull of a stopped worker takes messages too
        message.ready = False
        message.deliveries += 1
        sampling = Sampling(n=self.choices, logprobs=0 if self.logprobs else None)
        delivery = Delivery(
            request=Request(RID, "m", message.version, Input(prompt="p"), sampling, self.movable),
            tenant="t",
            seq=seq,
            handle=f"ack.{seq}.{message.deliveries}",
            reply=message.reply,
            deliveries=message.deliveries,
            resume=message.resume,
            generation_s=FAR,
        )
        self.send("broker", name, "pull", delivery)

    def serving(self, version: str) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.version == version]

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
        open_claims = sum(not claim.ended for claim in worker.table._claims.values())
        if worker.table.holding != open_claims:
            raise Violation(f"credit: {worker.name} counts {worker.table.holding} slots for {open_claims} claims")
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
                    if any(action.prefix):
                        worker.untold.add(action.run)
                case claims.Abort(run):
                    worker.runs.pop(run, None)
                    worker.untold.discard(run)
                case claims.Bill():
                    self.billed.add(action.outcome)
                case _:
                    raise Violation(f"false dead letter: {action}")

    def generate(self, worker: Worker, pick: int) -> None:
        """One token of one choice, or only its finish; before the first of a run, the text of its prefix."""
        run = list(worker.runs)[pick % len(worker.runs)]
        if run in worker.untold:
            worker.untold.remove(run)
            self.perform(worker, worker.table.tokens(self.told(run, worker.runs[run]), self.time_of(worker)))
            return
        ids, done = worker.runs[run], worker.finished[run]
        open_choices = [choice for choice in range(self.choices) if choice not in done]
        choice = open_choices[pick // 7 % len(open_choices)]
        new: list[int] = []
        if len(ids[choice]) < self.lengths[choice]:
            before = ids[choice][-1] if ids[choice] else choice + 1
            path = len(ids[choice]) % 2 if self.steady else pick // 31 % 2
            new = [before * 4 + path * 2 + (worker.version == NEW)]
            ids[choice] += new
        complete = len(ids[choice]) >= self.lengths[choice] and (not new or pick // 67 % 2 == 0)
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

    def told(self, run: str, prefix: list[list[int]]) -> list[TokenEvent]:
        return [
            TokenEvent(key=run, choice=choice, before=[str(token) for token in ids])
            for choice, ids in enumerate(prefix)
            if ids
        ]

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
                actions = unknown_rid(source, item, address)
                for action in actions:
                    if isinstance(action, asks.SendRelease) and self.without != "accounts":
                        action.release.usage = node.usage
                self.ask(node, actions)
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
            case ("published", message_id, seq, known):
                if node.publishing != message_id:
                    return
                node.publishing = None
                shared = known and (message_id == MOVED or (requester.keyed and message_id == FIRST))
                actions = requester.published(seq, now, shared=shared)
            case worker:
                actions = requester.no_responders(worker, now)
        if self.without == "body" and node.leid:
            requester.has_body = False
        self.ask(node, actions)
        if isinstance(item, tuple):
            self.withdraw(node)

    def withdraw(self, node: Node) -> None:
        """As the driver does it: on the change, after a publish ack, and at every tick."""
        if node.knows and node.end is None and node.requester.version == OLD:
            error = NoReplicaForPin("it was rolled back")
            self.ask(node, node.requester.withdrawn(error, NEW, self.time_of(node)))

    def ask(self, node: Node, actions: list[asks.Action]) -> None:
        for action in actions:
            if node.end is not None and not isinstance(action, asks.SendRelease | asks.DeleteMessage):
                raise Violation(f"two terminals: {action} after the end")
            match action:
                case asks.SendAttach(None, attach):
                    for name in self.serving(node.requester.version):
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
                    self.publish(node, copy_id(RID, node.requester.version, k))
                case asks.Move(version):
                    if any(node.log):
                        raise Violation(f"mix: {node.name} moves to {version} with {node.log}")
                    if not self.movable:
                        raise Violation(f"pin: {node.name} moves to {version}")
                case asks.DeleteMessage(seq, insist):
                    if insist and not node.requester.ended and MOVED not in self.published:
                        raise Violation(f"unstored: {node.name} deletes {seq} before there is a copy of it")
                    self.send(node.address, "broker", LASTING if insist else "js", ("delete", seq))
                case asks.DeadLetter():
                    self.stats["dead letters"] += 1
                case asks.Deliver():
                    self.deliver_tokens(node, action)
                case asks.End(error):
                    self.finish(node, error.code if error is not None else "complete")

    def deliver_tokens(self, node: Node, part: asks.Deliver) -> None:
        log = node.log[part.choice]
        if part.choice in node.finished and (part.ids or part.finish):
            raise Violation(f"repeat: {node.name} has finished choice {part.choice}, then {part}")
        if part.text != [str(token) for token in part.ids]:
            raise Violation(f"text: {part}")
        at = node.at[part.choice]
        scored = self.logprobs and (part.logprobs is not None or at + len(part.ids) > node.had_before[part.choice])
        if scored and part.ids and [entry.id for entry in part.logprobs or []] != part.ids:
            raise Violation(f"logprobs: {part}")
        for token in part.ids:
            if at == len(log):
                told_of = NEW if token & 1 else OLD
                if token >> 2 != (log[-1] if log else part.choice + 1) or told_of != node.requester.version:
                    raise Violation(f"mix: {node.name} has {log}, next token {token}")
                log.append(token)
            elif log[at] != token:
                raise Violation(f"mix: {node.name} has {log}, token {at} is told as {token}")
            at += 1
        node.at[part.choice] = at
        if part.finish is not None:
            if not at == len(log) == self.lengths[part.choice]:
                raise Violation(f"truncated: {node.name} choice {part.choice} complete at {log}")
            node.finished.add(part.choice)
        node.usage = part.usage or node.usage

    def finish(self, node: Node, how: str) -> None:
        node.end = how
        requester = node.requester
        if self.trace:
            print(f"    {node.name} ends: {how} {node.log}")
        self.stats[f"end {how}"] += 1
        if how == "complete":
            bad = node.client and (len(node.finished) != self.choices or node.usage is None)
        elif how == "request_poisoned":
            bad = self.deaths < DEATHS_MAX
        elif how == "stream_gone":
            bad = node.had
        elif how == "no_replica_for_pin":
            bad = not self.withdrawn or requester.may_move
        elif how == "diverged":
            bad = requester.received.met
        else:
            bad = not self.faults & set(ERRORS.get(how, ()))
        if bad:
            raise Violation(f"false {how}: {self.deaths} deaths, {node.name} with {node.log}")

    def tick_node(self, node: Node, now: float) -> None:
        node.ahead = max(node.ahead, now - self.now)
        self.ask(node, node.requester.tick(self.time_of(node)))
        self.withdraw(node)
