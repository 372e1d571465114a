"""A worker in behaviour only: `stand_in_worker.py BEHAVIOUR --model M --version V --worker-id ID`. It writes a lease and obeys.

serve: active until SIGTERM, then drains and ends. stubborn: like it, but SIGTERM does not end it. slow: starts for ever.
crash: ends with code 7 before it is active. permanent, transient: fails and says so. once: transient the first time, then
serve. When the file `<data>/claims` is there its number is what the lease says it has claimed.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import time

from shared import lifeline, records, subjects
from shared.bus import Bus
from shared.records import Lease
from shared.settings import Settings, load


async def run(settings: Settings, behaviour: str, given: argparse.Namespace) -> int:
    lease = Lease(
        worker=given.worker_id,
        model=given.model,
        version=given.version,
        state="starting",
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

    try:
        await write()
        if behaviour in ("permanent", "transient") or (behaviour == "once" and not tried.exists()):
            tried.touch()
            lease.state, lease.permanent = "failed", behaviour == "permanent"
            lease.reason = "the weights are corrupt" if lease.permanent else "the object store is away"
            await write()
            return 3
        if behaviour == "crash":
            print("boom: no such kernel", flush=True)
            os._exit(7)
        if behaviour != "slow":
            lease.state = "active"
        while not stop.is_set() or behaviour == "stubborn":
            if stop.is_set():
                lease.state = "draining"
            await write()
            await asyncio.wait([asyncio.ensure_future(stop.wait())], timeout=settings.lease_every_s)
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
