"""Run a batch through the command line and kill every process of the stack once on the way.

    python bench/batch.py --lines 50000                          on `sim:zero`
    python bench/batch.py --lines 2000 --tokens 16 --model DIRECTORY

Each line must have exactly one result, the counts must be right, both files complete and in order, each request accounted for
once, and nothing left in the queue. It prints the ingress's resident memory, too. The exit status is 1 if anything is
otherwise.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.batches import Outcome, Run, Stack

MIB = 1 << 20
NAME = "batch"


async def measure(directory: Path, options: argparse.Namespace) -> Outcome:
    """One run on a stack of its own."""
    async with Stack(directory) as stack:
        await stack.headrace("models", "push", options.model, "--name", NAME, "--version", "v1")
        run = Run(stack, directory, NAME, options.lines, options.tokens, options.padding_bytes)
        return await run.play(not options.once, lambda line: print(line, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer at most")
    parser.add_argument("--model", default="sim:zero", help="a directory with safetensors, or sim:PROFILE")
    parser.add_argument("--once", action="store_true", help="each process once, and not all of them at once in the end")
    parser.add_argument("--padding-bytes", type=int, default=0, help="of each line: 3700 make 50,000 lines 200 MB")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(measure(Path(directory), options))
    print(f"{outcome.lines} lines in {outcome.seconds:.1f} s, {len(outcome.killed)} kills: {outcome.status}")
    print(
        f"{outcome.answers} answers, {outcome.errors} errors, counts {outcome.counts}, {outcome.billed} accounted for"
    )
    peak, before = outcome.resident_peak / MIB, outcome.resident_before / MIB
    print(f"resident memory of the ingress: {before:.0f} MiB before, {peak:.0f} MiB at most")
    live = sorted(outcome.live_ms)
    print(f"/livez: median {live[len(live) // 2]:.1f} ms, 99 of 100 within {live[len(live) * 99 // 100]:.1f} ms")
    for problem in outcome.problems:
        print(f"NOT as promised: {problem}")
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
