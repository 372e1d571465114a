"""A randomised model of the wire that drives the production state machines, `Requester` and `ClaimTable`.

python tests/model/model.py --runs 100000              every rule, a random subset of the faults in each schedule
python tests/model/model.py --runs 5000 --each         each fault alone
python tests/model/model.py --mutants 5000             each rule taken away in turn: the model must find fault
python tests/model/model.py --replay 17 [--without X]  one schedule, told step by step
python tests/model/model.py --shrink mix --without sid a small counter-example
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable

from mutants import EVERY, WITHOUT
from wire_schedule import Killer, Schedule
from wire_world import Violation

from workers import claims
from workers.history import History

FAULTS = (
    *("kill", "stop", "hang", "loss", "broker", "rdeath", "move", "second", "twice", "drain", "false503"),
    *("cancel", "revoke", "deadline", "wfail", "ackwait", "nak", "pubfail", "reconnect", "handback"),
    "withdraw",
)
LIKELY = {"cancel": 0.12, "revoke": 0.12, "deadline": 0.12, "withdraw": 0.3}  # the first three end a schedule early
# -- campaigns ---------------------------------------------------------------------------------------------------------


def schedule(seed: int, faults: Iterable[str] = FAULTS) -> tuple[list[int], list[str]]:
    """The integers and the faults of a seed."""
    rng = random.Random(seed)
    chosen = list(faults)
    if len(chosen) > 2:
        chosen = [fault for fault in chosen if rng.random() < LIKELY.get(fault, 0.45)]
    return [rng.getrandbits(40) for _ in range(rng.choice((12, 20, 30, 45, 70)))], chosen


def check(ints: list[int], faults: Iterable[str], without: str = "", trace: bool = False) -> tuple[str, Counter[str]]:
    """The violation of one schedule ("" for none) and what happened."""
    rules = WITHOUT[without] if without else EVERY
    world = Killer if rules.kills else Schedule
    claims.History = rules.history
    try:
        return "", world(ints, faults, rules, trace).run()
    except Violation as violation:
        return str(violation), Counter()
    finally:
        claims.History = History


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


def campaign(
    first: int, runs: int, faults: Iterable[str] = FAULTS, without: str = ""
) -> tuple[dict[str, list[int]], Counter[str]]:
    """The seeds of each kind of violation, and what happened over all."""
    found: dict[str, list[int]] = {}
    stats: Counter[str] = Counter()
    for seed in range(first, first + runs):
        violation, happened = check(*schedule(seed, faults), without)
        stats.update(happened)
        if violation:
            found.setdefault(violation.split(":")[0], []).append(seed)
    return found, stats


def first(faults: Iterable[str], without: str, seeds: int, kind: str = "") -> int:
    """The first seed whose schedule breaks a promise, of that kind if one is given; 0: none of so many."""
    for seed in range(1, seeds + 1):
        violation = check(*schedule(seed, faults), without)[0]
        if violation and violation.partition(":")[0] == (kind or violation.partition(":")[0]):
            return seed
    return 0


def report(label: str, first: int, runs: int, faults: list[str], without: str = "") -> bool:
    """Run a campaign and print it; whether it was clean."""
    begin = time.monotonic()
    found, stats = campaign(first, runs, faults, without)
    kinds = ", ".join(f"{kind} {len(seeds)} (seed {seeds[0]})" for kind, seeds in sorted(found.items())) or "0"
    print(
        f"{label}: seeds {first}..{first + runs - 1}, {time.monotonic() - begin:.0f} s, violations {kinds}", flush=True
    )
    print("   ", ", ".join(f"{name} {count}" for name, count in sorted(stats.items())), flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 2000), ("first", 1), ("mutants", 0), ("replay", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--each", action="store_true", help="each fault alone")
    parser.add_argument("--without", default="", choices=["", *WITHOUT])
    parser.add_argument("--shrink", default="", help="the kind of violation to find a small schedule of")
    options = parser.parse_args()
    faults = options.faults.split(",")
    if options.replay:
        print(check(*schedule(options.replay, faults), options.without, trace=True)[0] or "no violation")
        return 0
    if options.mutants:
        for rule, rules in WITHOUT.items():
            report(f"without {rule}", options.first, options.mutants, list(rules.faults) or faults, rule)
        return 0
    if options.shrink:
        found, _ = campaign(options.first, options.runs, faults, options.without)
        small = [shrink(*schedule(seed, faults), options.without, options.shrink) for seed in found[options.shrink][:5]]
        ints, faults = min(small, key=lambda case: (len(case[1]), len(case[0])))
        print(faults, "\n", check(ints, faults, options.without, trace=True)[0])
        return 0
    if options.each:
        clean = [report(f"only {fault}", options.first, options.runs, [fault]) for fault in faults]
        return int(not all(clean))
    return int(not report("all rules", options.first, options.runs, faults, options.without))


if __name__ == "__main__":
    raise SystemExit(main())
