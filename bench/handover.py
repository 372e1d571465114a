"""Replace an ingress again and again under clients that open a connection for each request, and count what they lose.

    python bench/handover.py [--restarts 12] [--clients 16]

Once with new connections steered to the other process before the old socket is closed, once without. docs/reliability.md.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace.stack import ports, servers
from shared.lifeline import die_with_parent
from shared.settings import Settings, to_environment

ENTRY = "import ingress.main as main; from shared.settings import load; "
UNSTEERED = "exec('async def stay(*_): pass'); main.steer_away = stay; "


class Handover:
    """One run: a NATS, an ingress that is replaced, and clients."""

    def __init__(self, settings: Settings, steered: bool) -> None:
        self.answered = 0
        self.lost: Counter[str] = Counter()
        self._settings = settings
        self._code = ENTRY + ("" if steered else UNSTEERED) + "main.main(load())"
        self._stopped = False

    async def get(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(self._settings.http_host, self._settings.http_port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            return await reader.read()
        finally:
            writer.close()

    async def client(self) -> None:
        while not self._stopped:
            try:
                answer = await self.get("/livez")
            except OSError as error:
                self.lost[type(error).__name__] += 1
                continue
            if b" 200 OK" in answer:
                self.answered += 1
            else:
                self.lost[answer[:40].decode("latin-1") or "no answer"] += 1

    async def start(self) -> subprocess.Popen[bytes]:
        """A new ingress; it answers on the port when this returns."""
        process = self._spawn()
        wanted = b'"pid":%d}' % process.pid
        for _ in range(1000):
            try:
                if wanted in await self.get("/readyz"):
                    return process
            except OSError:
                pass
            await asyncio.sleep(0.02)
        raise RuntimeError("the ingress does not answer")

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", self._code],
            env=os.environ | to_environment(self._settings),
            cwd=Path(__file__).parents[1],
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )

    async def run(self, restarts: int, clients: int) -> None:
        current = await self.start()
        running = [asyncio.create_task(self.client()) for _ in range(clients)]
        for _ in range(restarts):
            following = await self.start()
            current.terminate()
            await asyncio.to_thread(current.wait)
            current = following
        self._stopped = True
        await asyncio.gather(*running)
        current.terminate()
        await asyncio.to_thread(current.wait)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=12)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    nats_port, http_port = ports.free_ports(2)
    with tempfile.TemporaryDirectory() as directory:
        server = servers.nats(Path(directory) / "nats", nats_port)
        quiet = subprocess.DEVNULL
        nats = subprocess.Popen(
            server.argv, cwd=server.directory, stdout=quiet, stderr=quiet, preexec_fn=die_with_parent()
        )
        settings = Settings(
            nats_url=server.url,
            data_dir=directory,
            http_port=http_port,
            reuse_port=True,
            drain_budget_s=4.0,
            drain_linger_s=0.2,
        )
        try:
            for steered in (True, False):
                handover = Handover(settings, steered)
                asyncio.run(handover.run(options.restarts, options.clients))
                how = "steered" if steered else "not steered"
                print(f"{how}: {handover.answered} answered, lost {dict(handover.lost) or 0}", flush=True)
        finally:
            nats.terminate()
            nats.wait()


if __name__ == "__main__":
    main()
