"""bench/tenants.py at the size of the reference fleet, simulated: one tenant floods; five of different weights are backlogged.

    python bench/fleet/tenants.py                      # all tables: minutes of one core
    python bench/fleet/tenants.py --what flood --times 0.1 --seconds 20

flood: on the 99 GPUs of the reference, a quiet tenant sends short requests. A loud one is not there, floods with long
generations, by the ingresses or over NATS itself, or keeps as many open as workers had of it in the flood: the batches are
equally full and nothing waits. With the flood the p99 of the quiet one's time to the first token is to be at most 1.2 times
that, and at most that of the fleet without the loud one and two full steps.
others: the same on 144 GPUs beside 20 tenants with 1,000 requests a second in all, of which the worst is to keep the bounds,
too. The flood comes all at once, when the measured time begins. The first bound is 1.2 times the larger of both other rows.
shares: weights 1 to 5, all with more than they can get, by lanes and first come, first served (a burst without limit).

docs/tenancy.md has the figures. The exit status is 1 where a bound is missed.
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from headrace.fleet.report import Result
from headrace.fleet.scenario import Length, Scenario, Traffic, read
from headrace.fleet.simulation import simulate

HERE = Path(__file__).parent
WEIGHTS = {f"w{weight}": float(weight) for weight in range(1, 6)}
INGRESSES, OTHERS_GPUS = 4, 144
FLOOD, OPEN = 12_000, 3_000  # requests that the loud tenant has open; each of the five
QUEUE_MAX = 1_000_000  # of a tenant at an ingress: nobody is refused here
IN_TURN = 10**9  # a burst: first come, first served
SETTLE_S = {"flood": 20.0, "others": 10.0, "shares": 20.0}  # before anything is measured
TTFT_RATIO_MAX, FULL_STEPS = 1.2, 2
SHARE_ERROR_MAX, JAIN_MIN, THROUGHPUT_MIN = 0.03, 0.99, 0.95
QUIET = Traffic(name="quiet", rate=20, prompt=60, output=16)


def scenario_of(traffic: list[Traffic], settle_s: float, seconds: float, burst: int | None = None) -> Scenario:
    scenario = read(HERE / "reference.toml").with_fleet(ingresses=INGRESSES)
    settings = msgspec.structs.replace(scenario.settings, tenant_queue_max=QUEUE_MAX, queue_deadline_s=3600.0)
    if burst is not None:
        settings = msgspec.structs.replace(settings, tenant_burst=burst)
    return msgspec.structs.replace(scenario, traffic=traffic, settings=settings, warmup_s=settle_s, seconds=seconds)


def loud(count: int, direct: bool = False) -> Traffic:
    """So many are open; each that ends is followed by another."""
    length = Length(kind="uniform", mean=600, spread=0.5)
    return Traffic(kind="closed", name="loud", streams=count, prompt=100, output=length, direct=direct)


class Flood:
    """A table: what one tenant's flood does to the quiet one, and to others if there are any."""

    def __init__(self, what: str, times: float, seconds: float) -> None:
        self._what, self._times, self._seconds = what, times, seconds
        self._p99: dict[str, dict[str, float]] = {}  # by tenant and row, ms

    def _row(self, name: str, loud_one: list[Traffic]) -> Result:
        begin = time.process_time()
        quiet = msgspec.structs.replace(QUIET, rate=QUIET.rate / self._times)  # as many samples at any size
        scenario = scenario_of([quiet, *loud_one], SETTLE_S[self._what], self._seconds)
        if self._what == "others":
            others = read(HERE / "reference.toml").traffic
            scenario = msgspec.structs.replace(scenario, traffic=[*scenario.traffic, *others])
            scenario = scenario.with_fleet(workers=OTHERS_GPUS)
        result = simulate(scenario.times_larger(self._times))
        tenants = result.tenants
        had = tenants.get("loud")
        held, waiting = (had.held, had.waiting) if had is not None else (0.0, 0.0)
        cells = [f"{name} | {held:.0f} | {waiting:.0f} | {tenants['quiet'].ttft_ms.p50:.1f}"]
        self._note("quiet", name, tenants["quiet"].ttft_ms.p99, cells)
        if self._what == "others":
            worst = max(each.ttft_ms.p99 for tenant, each in tenants.items() if tenant.startswith("tenant"))
            self._note("the worst of the others", name, worst, cells)
        print(f"| {' | '.join(cells)} | {time.process_time() - begin:.0f} |", flush=True)
        return result

    def _note(self, tenant: str, row: str, p99: float, cells: list[str]) -> None:
        self._p99.setdefault(tenant, {})[row] = p99
        cells.append(f"{p99:.1f}")

    def run(self) -> bool:
        more = " others' p99 |" if self._what == "others" else ""
        print(f"| the loud tenant | held | waiting | quiet TTFT p50, ms | p99 |{more} CPU s |")
        print("|---|---|---|---|---|---|" + ("---|" if more else ""))
        self._row("is not there", [])
        if self._what == "others":
            floods = {"floods": msgspec.structs.replace(loud(0), kind="flood", count=FLOOD)}
        else:
            floods = {"floods": loud(FLOOD), "floods over NATS": loud(FLOOD, direct=True)}
        results = [self._row(name, [traffic]) for name, traffic in floods.items()]
        held = round(results[0].tenants["loud"].held / self._times)
        full = self._row("keeps the batch full", [loud(held)])
        holds = True
        for tenant, p99 in self._p99.items():
            alone = p99["is not there"]
            bounds = TTFT_RATIO_MAX * max(alone, p99["keeps the batch full"]), alone + FULL_STEPS * full.gap_ms.p50
            worst = max(p99[name] for name in floods)
            holds = holds and worst <= min(bounds)
            print(f"\n{tenant}: {worst:.1f} ms with the flood; bounds: {bounds[0]:.1f} and {bounds[1]:.1f} ms")
        return holds


def shares(times: float, seconds: float) -> bool:
    """The table of the five."""
    length = Length(kind="uniform", mean=200, spread=0.6)
    tenants = [
        Traffic(kind="closed", name=name, weight=weight, streams=OPEN, prompt=100, output=length)
        for name, weight in WEIGHTS.items()
    ]
    lanes, in_turn = (
        simulate(scenario_of(tenants, SETTLE_S["shares"], seconds, burst).times_larger(times))
        for burst in (None, IN_TURN)
    )
    served = {name: lanes.tenants[name].served for name in WEIGHTS}
    print("| weight | waiting | share of weights | share of service | error |\n|---|---|---|---|---|")
    worst = 0.0
    for name, weight in WEIGHTS.items():
        due, had = weight / sum(WEIGHTS.values()), served[name] / sum(served.values())
        worst = max(worst, abs(had / due - 1))
        waiting = lanes.tenants[name].waiting
        print(f"| {weight:g} | {waiting:.0f} | {due:.2%} | {had:.2%} | {had / due - 1:+.2%} |")
    by_weight = [served[name] / weight for name, weight in WEIGHTS.items()]
    jain = sum(by_weight) ** 2 / (len(by_weight) * sum(each**2 for each in by_weight))
    ratio = sum(served.values()) / sum(each.served for each in in_turn.tenants.values())
    print(f"\nJain's index by weight {jain:.4f}; {ratio:.3f} of the service of first come, first served")
    return worst <= SHARE_ERROR_MAX and jain >= JAIN_MIN and ratio >= THROUGHPUT_MIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=list(SETTLE_S), default=list(SETTLE_S))
    parser.add_argument("--times", type=float, default=1.0, help="the size of fleet and traffic")
    parser.add_argument("--seconds", type=float, default=30.0, help="that are measured, each time")
    options = parser.parse_args()
    results = []
    for what in options.what:
        if what == "shares":
            results.append(shares(options.times, options.seconds))
        else:
            results.append(Flood(what, options.times, options.seconds).run())
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
