"""Submit jobs, kill every process at once, and see that each completes once, with its own answer, and that its webhook is told.

    python bench/jobs.py --jobs 1000 --seed 1
    python bench/jobs.py --jobs 1000 --times 3

Real processes: NATS, a controller, workers of the simulated engine, two ingresses; all of them get SIGKILL at the same moment,
while jobs are submitted, and come back. A receiver of webhooks outside of it all refuses one delivery in ten.
The exit status is 1 if a job was lost, ran twice, came to something else, or was not told of, or under several ids.
"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.jobs import play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="that everything is killed")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in good order
    report = asyncio.run(play(options.jobs, options.seed, options.times, options.workers))
    print("\n".join(report.lines()), flush=True)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
