"""The autoscaler beside plain ones, in replays on a virtual clock: requests that were late, and replica-seconds used.

    python bench/fleet/scaling.py [--scale 1.0] [--only spike,day]

The plain ones look at the queue only: replicas = ceil(messages / threshold), up at once, down when the last `cool_down_s`
asked for no more. `pending`: messages that no worker has, as the usual scalers of a queue count them. `all`: those that
workers have as well, with the threshold at 70% of a worker's slots: the best that a threshold can be set to.
"""

import argparse
import math
from collections import deque

from controller.autoscaler import Decision, Policy, Snapshot
from headrace.fleet.control import Decide
from headrace.fleet.report import Result
from headrace.fleet.scenario import Burst, Fault, FleetSpec, Scenario, Traffic
from headrace.fleet.simulation import Simulation
from shared.records import EngineSettings

SLOTS = 45
ENGINE = EngineSettings(slots=SLOTS, tpot_ms_target=30.0, ttft_ms_target=500.0, prefix_cache="off")


class Threshold:
    """A plain scaler. What it does not know holds."""

    def __init__(self, threshold: float, counts_claimed: bool, cool_down_s: float) -> None:
        self._threshold, self._counts_claimed, self._cool_down_s = threshold, counts_claimed, cool_down_s
        self._asked: deque[tuple[float, int]] = deque()
        self._since: float | None = None

    def decide(self, snapshot: Snapshot, now: float, policy: Policy) -> list[Decision]:
        (facts,) = snapshot.versions
        current = len(facts.replicas)
        desired = current
        if facts.lag is not None:
            messages = facts.lag.total if self._counts_claimed else facts.lag.pending
            needed = min(facts.max_replicas, max(facts.min_replicas, math.ceil(messages / self._threshold)))
            while self._asked and self._asked[0][0] <= now - self._cool_down_s:
                self._asked.popleft()
            self._asked.append((now, needed))
            self._since = now if self._since is None else self._since
            lately = max(count for _, count in self._asked) if now - self._since >= self._cool_down_s else current
            desired = max(needed, min(current, lately))
        return [Decision(model=facts.model, version=facts.version, desired=desired, reasons=("threshold",))]


def scalers() -> dict[str, Decide | None]:
    """Fresh ones, by name; None: the production's."""
    return {
        "headrace": None,
        "pending / 10, 300 s": Threshold(10.0, False, 300.0).decide,
        "all / 31, 60 s": Threshold(0.7 * SLOTS, True, 60.0).decide,
    }


def replays(scale: float) -> dict[str, Scenario]:
    """The replays, with `scale` times the traffic. Workers take 24 s to start."""
    rate = 20.0 * scale
    workers = max(2, round(3 * scale))
    fleet = FleetSpec(workers=workers, profile="a100-40g-13b", kv_dtype="8-bit", autoscale=True, min_workers=1)

    def replay(name: str, seconds: float, faults: list[Fault] | None = None, **traffic: object) -> Scenario:
        given = Traffic(**({"rate": rate, "tenants": 20} | traffic))
        return Scenario(
            name=name, traffic=[given], seconds=seconds, fleet=fleet, engine=ENGINE, faults=faults or [], seed=3
        )

    spike = [Burst(at_s=60.0, seconds=90.0, times=10.0)]
    return {
        "steady": replay("steady", 600.0),
        "day": replay("day", 900.0, rate=3 * rate, day_s=900.0, night=0.1),
        "spike": replay("spike", 300.0, rate=rate / 2, bursts=spike),
        "dead metrics": replay("dead metrics", 240.0, [Fault(kind="dead_metrics", at_s=60.0, seconds=90.0)]),
        "dead worker": replay("dead worker", 240.0, [Fault(kind="dead_worker", at_s=60.0, seconds=30.0, count=1)]),
    }


def run(scenario: Scenario, decide: Decide | None) -> Result:
    """One replay under one scaler."""
    return Simulation(scenario, decide=decide).run()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the traffic")
    parser.add_argument("--only", default="", help="replays by name, with commas")
    chosen = parser.parse_args()
    only = [name for name in chosen.only.split(",") if name]
    print("| replay | requests | scaler | late | TTFT p99, ms | replica-seconds | starts | most |\n|" + "---|" * 8)
    for name, scenario in replays(chosen.scale).items():
        if only and name not in only:
            continue
        for label, decide in scalers().items():
            found = run(scenario, decide)
            most = max(sum(sample.workers.values()) for sample in found.timeline)
            late = f"{found.late} ({found.late / found.requests:.1%})"
            figures = (late, f"{found.ttft_ms.p99:.0f}", f"{found.gpu_hours * 3600:.0f}", found.starts, most)
            print("|", " | ".join(str(each) for each in (name, found.requests, label, *figures)), "|", flush=True)


if __name__ == "__main__":
    main()
