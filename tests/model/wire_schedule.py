"""Schedules: a list of integers, each picking one of the actions that are possible in the world.

Every actor has a clock of its own that may run ahead, so in the chaos phase any timer may fire at any moment; then faults
stop, and a calm phase with a common clock must reach quiescence.
"""

import random
from collections import Counter
from typing import Any

from wire_world import FAR, FIRST, LASTING, MOVED, NEW, OLD, RID, Node, Violation, Worker, World

from shared import usage
from shared.errors import Unavailable
from shared.wire import About
from workers import claims
from workers.engine.request import TokenEvent

STEP_S = 0.5  # of the calm phase
ROUNDS_MAX = 240
REQUESTERS_MAX = 3
HARMLESS = frozenset(
    ("deliver", "hand out", "ackwait", "continue", "generate", "resend", "grace", "forget", "tick", "publish", "learn")
)


class Schedule(World):
    """`run` raises Violation, or returns what happened, counted."""

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
        if "withdraw" in faults and not self.withdrawn:
            found.append(("withdraw", None))
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
            found += [(name, worker) for name in ("wfail", "handback") if name in faults]
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
        if self.withdrawn and not node.knows:
            found += [("learn", node)] * 3
        if node.publishing is not None:
            found.append(("publish", node))
            if "pubfail" in faults:
                found += [("pubfail", node)] * (1 if node.publishing == FIRST else 3)
        if "false503" in faults and node.requester.worker is not None:
            found.append(("false503", node))
        if "reconnect" in faults:
            found.append(("reconnect", node))
        if node.client:
            found += [(name, node) for name in ("cancel", "deadline", "revoke") if name in faults]
            if len(self.nodes) < REQUESTERS_MAX and "twice" in faults:
                found.append(("twice", node))
            if len(self.nodes) < REQUESTERS_MAX and (node.requester.seq is not None or node.requester._moving):
                found += [(name, node) for name in ("move", "second") if name in faults]
                if "rdeath" in faults:
                    found += [("die", node), ("die+move", node)]
        return found

    def step(self, name: str, target: Any, pick: int) -> None:
        if self.trace and name != "deliver":
            print(f"* {name} {getattr(target, 'name', target)}")
        self.now += 0.001
        forced = name == "ackwait" and self.held(target)
        if forced or name not in HARMLESS:
            self.budget -= 1
        self.deaths += name in ("kill", "lose", "broker", "false503")
        getattr(self, "do_" + name.replace(" ", "_").replace("+", "_and_"))(target, pick)

    def do_deliver(self, key: tuple[str, str, str], pick: int) -> None:
        self.deliver(key)

    def do_lose(self, _: None, pick: int) -> None:
        keys = [key for key in self.net if key[2] != LASTING]
        if keys:
            self.pop(keys[pick % len(keys)], "lost: ")

    def do_withdraw(self, _: None, pick: int) -> None:
        """The version is rolled back; who publishes learns of it at a time of its own."""
        self.withdrawn = True

    def do_learn(self, node: Node, pick: int) -> None:
        node.knows = True
        self.withdraw(node)

    def do_broker(self, _: None, pick: int) -> None:
        """The broker restarts: core messages go, the stream stays, its last deliveries may be forgotten."""
        for key in list(self.net):
            if key[2] == LASTING:
                continue
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
        self.new_worker(worker.version)

    def do_drain(self, worker: Worker, pick: int) -> None:
        if not worker.stopped and pick % 2 and not worker.table.draining:
            worker.table.drain()  # it will stop later
        else:
            self.perform(worker, worker.table.stop())
            if worker.runs:
                raise Violation(f"leak: {worker.name} stopped with {worker.runs}")
            self.remove(worker)
        self.new_worker(worker.version)

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

    def do_handback(self, worker: Worker, pick: int) -> None:
        self.perform(worker, worker.table.hand_back(next(iter(worker.runs))))

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
        self.ask(node, node.requester.publish_failed(Unavailable("no ack"), self.time_of(node)))

    def do_reconnect(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.reconnected(self.time_of(node)))

    def do_cancel(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.cancel(self.time_of(node)))

    def do_deadline(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.tick(self.time_of(node) + 2 * FAR))

    def do_second(self, node: Node, pick: int) -> None:
        """Another caller with the same idempotency key: its record names the first message, or it found where that went."""
        log: list[list[int]] = [[] for _ in range(self.choices)]
        seq, version = self.published[FIRST], OLD
        if node.requester.seq is not None and pick % 2:
            seq, version = node.requester.seq, node.requester.version
        self.new_node(f"R{len(self.nodes) + 1}", log, seq=seq, version=version)

    def do_twice(self, node: Node, pick: int) -> None:
        """Another caller with the same idempotency key, before its record names a sequence: it publishes, too."""
        log: list[list[int]] = [[] for _ in range(self.choices)]
        self.publish(self.new_node(f"R{len(self.nodes) + 1}", log, publisher=True), FIRST)

    def do_revoke(self, _: Node, pick: int) -> None:
        """Somebody ends the request for everybody; not everyone needs to hear of it."""
        for number, node in enumerate(list(self.nodes.values())):
            if node.alive and node.end is None and pick >> number & 3:
                self.ask(node, node.requester.cancel(self.time_of(node), everybody=True))
        for number, worker in enumerate(list(self.workers.values())):
            if not worker.stopped and pick >> number & 1:
                self.perform(worker, worker.table.cancel(About(RID, "t"), self.time_of(worker))[1])

    def do_die(self, node: Node, pick: int) -> None:
        node.alive = False

    def do_die_and_move(self, node: Node, pick: int) -> None:
        node.alive = False
        self.resume_elsewhere(node, pick % 3)  # the last tokens did not reach the client

    def do_move(self, node: Node, pick: int) -> None:
        self.ask(node, node.requester.client_left(self.time_of(node)))
        self.resume_elsewhere(node, pick % 3)

    def resume_elsewhere(self, node: Node, unread: int) -> None:
        node.client = False
        log = [ids[: max(0, len(ids) - unread)] for ids in node.log]
        seq, version = node.requester.seq, node.requester.version
        if seq is None:
            seq = node.requester._leaving[-1]
        if seq in self.messages:
            version = self.messages[seq].version
        self.new_node(f"R{len(self.nodes) + 1}", log, leid=True, seq=seq, version=version)

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
        if self.trace:
            print("    --- calm")
        for worker in self.workers.values():  # with "hang" a stopped worker never comes back
            worker.stopped = worker.stopped and "hang" in self.faults
        for version in {worker.version for worker in self.workers.values()}:
            if all(self.workers[name].stopped for name in self.serving(version)):
                self.new_worker(version)
        self.withdrawn = self.withdrawn or self.empty  # else who waits for it would wait without end
        for node in self.nodes.values():
            if self.withdrawn and node.alive and node.end is None:
                self.do_learn(node, 0)
        rng = random.Random(7)
        for turn in range(ROUNDS_MAX):
            self.now += STEP_S
            self.calm_network()
            self.calm_broker(rng)
            if self.empty:
                self.calm_queue()
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

    def calm_queue(self) -> None:
        """What lies in the queue of a version without workers: the leader moves it if nobody else can, or it grows too old."""
        for seq, message in list(self.messages.items()):
            if message.version != OLD or ((node := self.homes[message.reply]).alive and node.end is None):
                continue
            if self.movable and not node.alive:
                self.store(message.reply, MOVED, NEW)
            elif node.requester.version == NEW and not node.requester._leaving:
                continue  # it was for who moved it to delete it
            del self.messages[seq]

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
        complete = any(node.alive and node.end == "complete" for node in self.nodes.values())
        if complete and not {"rdeath", "move"} & self.faults and usage.COMPLETED not in self.billed:
            raise Violation(f"unbilled: {self.billed} of a request that completed")
        return True


class Killer(Schedule):
    """The request kills every worker that starts it for a requester: the prefill ends the process."""

    def perform(self, worker: Worker, actions: list[claims.Action]) -> None:
        super().perform(worker, actions)
        claim = worker.table._claims.get(RID)
        if worker.name in self.workers and worker.runs and claim is not None and claim.subscribers:
            self.do_kill(worker, 0)
            self.deaths += 1

    def generate(self, worker: Worker, pick: int) -> None:
        pass
