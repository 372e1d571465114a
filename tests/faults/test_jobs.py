"""A short run of `bench/jobs.py`: everything is killed while jobs are submitted; each completes once, webhooks tell."""

import asyncio

from faults.jobs import play

FAST = {"ack_wait_s": 2.0, "in_progress_every_s": 0.5, "pull_expires_s": 1.0}


def test_every_job_completes_once_though_everything_is_killed() -> None:
    report = asyncio.run(play(100, seed=7, **FAST))
    print("\n".join(report.lines()))
    assert report.problems == []
    assert report.outcomes == {"completed": 100}
    assert report.deliveries >= 100 + report.refused
    assert report.kills == 6  # NATS, the controller, two ingresses and two workers
