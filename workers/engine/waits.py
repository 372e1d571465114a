"""How long those that wait for the batch will wait yet. A guess, for whoever may be better off elsewhere."""

import math

from workers.engine.blocks import blocks_for
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence


def steps_to_wait(scheduler: Scheduler) -> list[tuple[Sequence, float]]:
    """(sequence, steps) for each that waits.

    By Little's law places become free at the rate of those that have one to the steps that they keep it: the mean so far,
    or as long as the oldest one has kept its own. One that lacks memory needs as many of them as hold that much.
    """
    running = len(scheduler.running)
    if running == 0:
        return []
    oldest = scheduler.steps - next(iter(scheduler.running)).entered
    between = max(scheduler.residence, oldest) / max(scheduler.places, running)
    blocks_each = max(1.0, scheduler.pool.used / running)
    queues = scheduler.ledger.order()
    found = []
    for account in queues:
        for place, sequence in enumerate(account.waiting, start=1):
            turn = sum(min(place, len(other.waiting)) for other in queues)
            lacking = blocks_for(len(sequence.tokens)) - scheduler.pool.free
            found.append((sequence, between * max(turn, math.ceil(lacking / blocks_each))))
    return found
