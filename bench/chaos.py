"""Break a running service on purpose and account for every request.

    python bench/chaos.py --all
    python bench/chaos.py --scenario workers --kills 120 --seed 1
    python bench/chaos.py --scenario load --minutes 10
    python bench/chaos.py --scenario cancels --cancels 10000
    python bench/chaos.py --scenario model --kills 50 --model DIRECTORY

Real processes: NATS, a controller, four workers of the simulated engine, two ingresses. A load of mixed requests runs whose
every answer is known; a schedule made from the seed kills and stops processes under it. In the end each request must be
completed with exactly its own tokens, or have failed with a code, or have been left by its client; nothing may still be
held anywhere. The exit status is 1 if anything is otherwise. docs/reliability.md has the figures.
"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import everything
from faults.scenarios import SCENARIOS, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--scenario", nargs="+", choices=sorted(SCENARIOS))
    which.add_argument("--all", action="store_true", help="everything at full size, in less than 45 minutes")
    parser.add_argument("--share", type=float, default=1.0, help="of the size of --all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="faults to inject, in each scenario that has some")
    parser.add_argument("--minutes", type=float, default=0.0, help="of load at least")
    parser.add_argument("--cancels", type=int, default=1000, help="clients that leave, in the scenario cancels")
    parser.add_argument("--model", type=Path, help="directory of a real model, for the scenario model: safetensors")
    options = parser.parse_args()
    if options.scenario and any(SCENARIOS[name].real for name in options.scenario) and options.model is None:
        parser.error("the scenario model needs --model DIRECTORY")
    logging.basicConfig(level=logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in good order: what was stopped is woken, so that it ends
    if options.all:
        sys.exit(not asyncio.run(everything.run(options.seed, options.share)))
    failed = False
    for name in options.scenario:
        cancels = options.cancels if name == "cancels" else 0
        report = asyncio.run(
            play(SCENARIOS[name], options.seed, options.kills, 60 * options.minutes, cancels, options.model)
        )
        print("\n".join(report.lines()), flush=True)
        failed |= bool(report.problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
