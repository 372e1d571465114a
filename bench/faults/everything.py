"""All scenarios at full size, in less than 45 minutes on two cores: one after the other, but for those that mostly wait."""

import asyncio
import sys
import time
from pathlib import Path

CHAOS = str(Path(__file__).parents[1] / "chaos.py")

# groups run one after the other, the lanes of a group side by side, the runs of a lane one after the other
GROUPS: list[list[list[tuple[str, int, float, int]]]] = [  # scenario, faults, minutes, cancels
    [[("workers", 1000, 0, 0)]],
    [
        [("load", 0, 15, 0)],
        [("cluster", 30, 0, 0), ("stop", 30, 0, 0), ("cut", 15, 0, 0), ("rolling", 18, 0, 0), ("ingress", 100, 0, 0)],
    ],
    [[("nats", 100, 0, 0)], [("controller", 200, 0, 0)]],  # every other fault of the controller's is a worker
    [[("cancels", 0, 0, 10_000)]],
]


async def run(seed: int, share: float) -> bool:
    """Run everything, or a `share` of it; whether all was as promised."""
    begin = time.monotonic()
    good = True
    for lanes in GROUPS:
        good &= all(await asyncio.gather(*(_play(lane, seed, share) for lane in lanes)))
    print(f"everything: {(time.monotonic() - begin) / 60:.1f} minutes, {'as promised' if good else 'NOT as promised'}")
    return good


async def _play(lane: list[tuple[str, int, float, int]], seed: int, share: float) -> bool:
    good = True
    for scenario in lane:
        process = await asyncio.create_subprocess_exec(*_command(seed, share, *scenario))
        try:
            good &= await process.wait() == 0
        finally:
            if process.returncode is None:  # this run is ended from outside, and that one with it
                process.terminate()
                await process.wait()
    return good


def _command(seed: int, share: float, scenario: str, faults: int, minutes: float, cancels: int) -> list[str]:
    command = [sys.executable, CHAOS, "--scenario", scenario, "--seed", str(seed)]
    command += ["--kills", str(max(1, round(faults * share)) if faults else 0)]
    return [*command, "--minutes", str(minutes * share), "--cancels", str(max(1, round(cancels * share)))]
