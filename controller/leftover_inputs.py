"""What is left behind in the object store: inputs that no message refers to any more, and uploads that were never completed.
Nobody but the leader removes it.

Who ends a message removes its input (shared.claim_check). Left behind are those of messages that ended by themselves, or
while the store was away. Not every store has rules for the life of objects, and to set one would replace those that the
bucket has: so it is done here, by age. An upload whose process was killed leaves the parts that it had sent.
"""

import asyncio
import itertools
import logging
import time

from shared.background import end
from shared.claim_check import DEAD_INPUTS, INPUTS, JOB_INPUTS
from shared.errors import HeadraceError, NotFound
from shared.manifests import MODELS
from shared.objects import ObjectInfo, ObjectStore
from shared.settings import Settings
from shared.streams import DEAD_LETTERS_KEPT_S

log = logging.getLogger(__name__)

EVERY_S = 900.0
REMOVED_MAX = 10_000  # in one sweep; the next one goes on
UPLOAD_S = 86_400.0  # no upload takes so long
UPLOADED = (
    "files/",
    "batches/",
    MODELS,
    f"{INPUTS}/",
    f"{JOB_INPUTS}/",
    f"{DEAD_INPUTS}/",
)  # the bucket may have others' too
MARGIN_S = 3600.0  # the store has a clock of its own, and a message may be read at its last moment


class LeftoverInputs:
    """Sweeps the store, one sweep at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0

    def step(self, now: float) -> None:
        """Begin a sweep when one is due."""
        if now >= self._next_at and (self._task is None or self._task.done()):
            self._next_at = now + EVERY_S
            self._task = asyncio.create_task(self._sweep(), name="leftover inputs")

    async def close(self) -> None:
        await end(self._task)

    async def _sweep(self) -> None:
        try:
            removed = await asyncio.to_thread(remove_leftovers, self._settings, time.time())
        except HeadraceError as error:
            log.info("inputs that nobody needs stay for now: %s", error.message)
        else:
            if removed:
                log.info("%d inputs and uploads that nothing refers to any more were removed", removed)


def remove_leftovers(settings: Settings, now: float) -> int:
    """Remove what is old enough, `now` in unix seconds; how many there were. Raises ObjectsUnavailable."""
    objects = ObjectStore(settings)
    limits = {
        INPUTS: settings.stored_input_kept_s,
        JOB_INPUTS: settings.job_max_age_s,
        DEAD_INPUTS: DEAD_LETTERS_KEPT_S,
    }
    removed = 0
    for place, age_s in limits.items():
        removed += _remove(objects, place, now - age_s - MARGIN_S, REMOVED_MAX - removed)
    return removed + _give_up_uploads(objects, now - UPLOAD_S)


def _give_up_uploads(objects: ObjectStore, before: float) -> int:
    try:
        return sum(objects.abort_uploads(prefix, before) for prefix in UPLOADED)
    except NotFound:
        return 0


def _remove(objects: ObjectStore, place: str, before: float, count_max: int) -> int:
    try:
        old: list[ObjectInfo] = [
            *itertools.islice((each for each in objects.each(f"{place}/") if each.modified < before), count_max)
        ]
    except NotFound:  # there is no bucket: nothing was ever stored
        return 0
    for each in old:
        objects.remove(each.key)
    return len(old)
