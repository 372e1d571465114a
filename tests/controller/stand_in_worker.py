"""A worker in behaviour only: `stand_in_worker.py BEHAVIOUR --worker-id ID [--model M --version V]`.

It writes a lease and obeys. Without a model it is warm until it is assigned one. It is active or only loaded as it is told.

serve: active until SIGTERM, then drains and ends. stubborn: like it, but SIGTERM does not end it. slow: starts for ever.
crash: ends with code 7 before it is active; crash-warm: only one without a model. permanent, transient: fails and says so.
once: transient the first time, then serve. away: transient with the model `away`, serve with others. When the file
`<data>/claims` is there its number is what the lease says it has claimed.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import time

from shared import lifeline, records, subjects, wire
from shared.bus import Bus, Message
from shared.records import Lease
from shared.settings import Settings, load


async def run(settings: Settings, behaviour: str, given: argparse.Namespace) -> int:
    lease = Lease(
        worker=given.worker_id,
        model=given.model or "",
        version=given.version or "",
        state="starting",
        device=os.environ.get("HEADRACE_DEVICE", ""),
        pid=os.getpid(),
        host=socket.gethostname(),
        started=float(os.environ["HEADRACE_SPAWNED_AT"]),
        slots=2,
        cold_start={"process": time.time() - float(os.environ["HEADRACE_SPAWNED_AT"])},
    )
    claims, tried = settings.data_path / "claims", settings.data_path / "tried"
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bus = await Bus.connect(settings, f"worker-{lease.worker}")

    async def write() -> None:
        lease.claims = int(claims.read_text()) if claims.exists() else 0
        await bus.kv_put(subjects.WORKERS_BUCKET, subjects.key(lease.worker), records.encode(lease))

    claim, told = True, asyncio.Event()

    def on_assign(message: Message) -> None:
        nonlocal claim
        assign = wire.decode_assign(message.data)
        if lease.model in ("", assign.model):
            lease.model, lease.version, claim = assign.model, assign.version, assign.claim
            told.set()

    async def pause() -> None:
        """Until it is told something, told to stop, or a lease is due."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, told)]
        await asyncio.wait(waits, timeout=settings.lease_every_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        told.clear()

    try:
        await bus.subscribe(subjects.worker_assign(lease.worker), on_assign)
        await bus.subscribe(subjects.worker_drain(lease.worker), lambda _: stop.set())
        await write()
        if behaviour == "crash-warm" and not lease.model:
            print("boom: no such library", flush=True)
            os._exit(7)
        while not lease.model and not stop.is_set():
            lease.state = "warm"
            await write()
            await pause()
        lease.state = "starting"
        await write()
        if (
            behaviour in ("permanent", "transient")
            or (behaviour == "away" and lease.model == "away")
            or (behaviour == "once" and not tried.exists())
        ):
            tried.touch()
            lease.state, lease.permanent = "failed", behaviour == "permanent"
            lease.reason = "the weights are corrupt" if lease.permanent else "the object store is away"
            await write()
            return 3
        if behaviour == "crash":
            print("boom: no such kernel", flush=True)
            os._exit(7)
        while not stop.is_set() or behaviour == "stubborn":
            if stop.is_set():
                lease.state = "draining"
            elif behaviour != "slow":
                lease.state = "active" if claim else "loaded"
            await write()
            await pause()
            if stop.is_set() and behaviour == "stubborn":
                await asyncio.sleep(settings.lease_every_s)
        lease.state = "draining"
        await write()
        await bus.kv_delete(subjects.WORKERS_BUCKET, subjects.key(lease.worker))
        return 0
    finally:
        await bus.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    for name in ("model", "version", "worker-id"):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    current = load()
    if current.lifeline_fd is not None:
        lifeline.watch(current.lifeline_fd)
    sys.exit(asyncio.run(run(current, arguments.behaviour, arguments)))
