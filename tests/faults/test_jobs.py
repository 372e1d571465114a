"""A short run of `bench/jobs.py`: every process is killed at once while jobs are submitted, and each completes once."""

import asyncio

from faults.jobs import play

FAST = {"ack_wait_s": 2.0, "in_progress_every_s": 0.5, "pull_expires_s": 1.0}


def test_every_job_completes_once_though_everything_is_killed() -> None:
    report = asyncio.run(play(100, seed=7, **FAST))
    print("\n".join(report.lines()))
    assert report.problems == []
    assert report.outcomes == {"completed": 100}
    assert report.kills == 6  # NATS, the controller, two ingresses and two workers
