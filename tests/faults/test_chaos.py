"""A short run of `bench/chaos.py`: every kind of fault under a mixed load, and every request accounted for."""

import asyncio

from faults.scenarios import SCENARIOS, play


def test_every_request_is_accounted_for_whatever_dies() -> None:
    report = asyncio.run(play(SCENARIOS["seconds"], seed=4, faults=12, seconds=0))
    print("\n".join(report.lines()))
    assert report.problems == []
    assert report.faults == dict.fromkeys(SCENARIOS["seconds"].kinds, 2)
    assert report.outcomes["completed"] > 30
    assert report.moved > 0
