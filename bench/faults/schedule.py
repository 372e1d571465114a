"""What is broken when: a list that a seed makes, and the hands that carry it out."""

import asyncio
import contextlib
import os
import random
import signal
import time

import msgspec

from faults.fleet import Fleet
from shared.errors import Unavailable

STOPPED_S = 10.0
BROKER_DOWN_S = 0.3
LEADER_DOWN_S = 2.0
CUT_S = 4.0
VICTIM_WAIT_S = 15.0


class Fault(msgspec.Struct):
    """`pick` chooses the victim among those that there are: the same number, the same place in their order."""

    at: float  # seconds after the start
    kind: str
    pick: int


class Done(msgspec.Struct):
    """A fault as it was injected: monotonic seconds, and whom it hit."""

    kind: str
    begin: float
    end: float
    victim: str


def make(seed: int, kinds: list[str], count: int, every_s: float) -> list[Fault]:
    """`count` faults, one each `every_s` seconds give or take half of it, of kinds that take turns."""
    dice = random.Random(seed)
    return [
        Fault(every_s * (number + dice.uniform(0.5, 1.5)), kinds[number % len(kinds)], dice.getrandbits(30))
        for number in range(count)
    ]


class Injector:
    """Carries a schedule out on a fleet. `done` says what was done; faults that last end before `run` returns."""

    def __init__(self, fleet: Fleet, stopped_s: float = STOPPED_S) -> None:
        """`stopped_s`: how long a stopped worker stays so."""
        self._fleet, self._stopped_s = fleet, stopped_s
        self.done: list[Done] = []
        self._lasting: set[asyncio.Task[None]] = set()
        self._stopped: set[int] = set()

    async def run(self, faults: list[Fault]) -> None:
        start = time.monotonic()
        late = 0.0  # faults that wait for their victim put off the rest
        try:
            for fault in faults:
                await asyncio.sleep(max(0.0, start + late + fault.at - time.monotonic()))
                await getattr(self, "_" + fault.kind)(fault.pick)
                late = max(late, time.monotonic() - start - fault.at)
            await asyncio.gather(*self._lasting)
        finally:
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _note(self, kind: str, victim: str, begin: float | None = None) -> Done:
        now = time.monotonic()
        self.done.append(Done(kind, begin or now, now, victim))
        return self.done[-1]

    def _last(self, work: "asyncio.Task[None]") -> None:
        self._lasting.add(work)
        work.add_done_callback(self._lasting.discard)

    async def _victim(self, pick: int) -> tuple[str, int]:
        fleet = self._fleet
        await fleet.until(
            lambda: any(lease.pid not in self._stopped for lease in fleet.active()), VICTIM_WAIT_S, "a worker to harm"
        )
        workers = [lease for lease in fleet.active() if lease.pid not in self._stopped]
        chosen = workers[pick % len(workers)]
        return chosen.worker, chosen.pid

    async def _kill_worker(self, pick: int) -> None:
        worker, pid = await self._victim(pick)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._note("kill_worker", worker)

    async def _kill_worker_of_all(self, pick: int) -> None:
        """Only when the one that was killed before has been replaced: for workers that take long to start."""
        await self._fleet.all_active()
        await self._kill_worker(pick)

    async def _term_worker(self, pick: int) -> None:
        worker, pid = await self._victim(pick)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        self._note("term_worker", worker)

    async def _stop_worker(self, pick: int) -> None:
        worker, pid = await self._victim(pick)
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        self._last(asyncio.create_task(self._wake(pid, self._note("stop_worker", worker))))

    async def _wake(self, pid: int, note: Done) -> None:
        await asyncio.sleep(self._stopped_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)
        note.end = time.monotonic()

    async def _kill_ingress(self, pick: int) -> None:
        ingresses = self._fleet.ingresses
        number = pick % len(ingresses)
        begin = time.monotonic()
        await asyncio.to_thread(ingresses[number].kill)
        note = self._note("kill_ingress", ingresses[number].name, begin)
        await self._fleet.ready(number)
        note.end = time.monotonic()

    async def _cut_ingress(self, pick: int) -> None:
        """An ingress loses its way to the server: nothing goes through and nobody is told, or its connections are closed."""
        number = pick % len(self._fleet.proxies)
        proxy, note = self._fleet.proxies[number], self._note("cut_ingress", self._fleet.ingresses[number].name)
        if pick // len(self._fleet.proxies) % 2:
            proxy.stall()
            await asyncio.sleep(CUT_S)
            proxy.restore()
        else:
            await proxy.sever()
            await asyncio.sleep(CUT_S)
            await proxy.start()
        await self._fleet.ready(number)
        note.end = time.monotonic()

    async def _replace_ingress(self, pick: int) -> None:
        number = pick % len(self._fleet.ingresses)
        note = self._note("replace_ingress", self._fleet.ingresses[number].name)
        status = await self._fleet.replace_ingress(number)
        assert status == 0, f"{note.victim} ended with {status}"
        note.end = time.monotonic()

    async def _term_controller(self, pick: int) -> None:
        controller = self._fleet.controller
        await self._fleet.until(lambda: controller.running, VICTIM_WAIT_S, "a controller to end")
        controller.signal(signal.SIGTERM)
        self._note("term_controller", controller.name)

    async def _kill_controller(self, pick: int) -> None:
        controller = self._fleet.controller
        await self._fleet.until(lambda: controller.running, VICTIM_WAIT_S, "a controller to kill")
        await asyncio.to_thread(controller.kill)
        self._note("kill_controller", controller.name)

    async def _kill_broker(self, pick: int) -> None:
        node = self._fleet.broker.nodes[0]
        await self._take_down(node.child.name, "kill_broker", BROKER_DOWN_S)

    async def _term_broker(self, pick: int) -> None:
        await self._take_down(self._fleet.broker.nodes[0].child.name, "term_broker", BROKER_DOWN_S, signal.SIGTERM)

    async def _kill_leader(self, pick: int) -> None:
        fleet = self._fleet
        deadline = time.monotonic() + 60
        while True:  # a cluster that misses a server already has no majority to lose
            with contextlib.suppress(Unavailable, KeyError):
                if await fleet.replicated():
                    break
            assert time.monotonic() < deadline, "the cluster did not come back"
            await asyncio.sleep(0.1)
        await self._take_down(await fleet.leader(), "kill_leader", LEADER_DOWN_S)

    async def _take_down(self, name: str, kind: str, seconds: float, number: signal.Signals = signal.SIGKILL) -> None:
        fleet = self._fleet
        node = fleet.broker.node_named(name)
        fleet.down.add(name)
        begin = time.monotonic()
        node.child.signal(number)
        await asyncio.to_thread(node.child.wait)
        note = self._note(kind, name, begin)
        await asyncio.sleep(seconds)
        node.child.start()
        fleet.down.discard(name)
        await node.ready()
        note.end = time.monotonic()
