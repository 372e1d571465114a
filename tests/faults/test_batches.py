"""A batch through the command line whose every process is killed on the way: bench/batch.py, small."""

import asyncio
from pathlib import Path

import pytest
from faults.batches import Outcome, Run, Stack

pytestmark = pytest.mark.e2e

FAST = {"HEADRACE_ACK_WAIT_S": "1", "HEADRACE_IN_PROGRESS_EVERY_S": "0.3"}  # what a dead worker had comes again soon


def test_each_line_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    async def play() -> Outcome:
        async with Stack(tmp_path, FAST) as stack:
            await stack.headrace("models", "push", "sim:zero", "--name", "batch", "--version", "v1")
            return await Run(stack, tmp_path, "batch", 1000, 8).play(True, print)

    outcome = asyncio.run(play())
    assert outcome.problems == []
    assert len(outcome.killed) == 7
    assert (outcome.answers, outcome.errors, outcome.billed) == (990, 10, 990)
