import asyncio
import secrets
import time

import pytest
from msgspec.structs import replace

from controller import leftover_inputs
from controller.leftover_inputs import EVERY_S, UPLOAD_S, LeftoverInputs, remove_leftovers
from shared.claim_check import DEAD_INPUTS, INPUTS, JOB_INPUTS
from shared.errors import ObjectsUnavailable
from shared.objects import ObjectStore
from shared.settings import Settings

DAY_S = 86_400.0
DEAD, JOB = f"{DEAD_INPUTS}/t/r/3", f"{JOB_INPUTS}/t/r/4"
OTHER = "models/m/v/manifest.json"


@pytest.fixture
def settings(s3_settings: Settings) -> Settings:
    """Of a bucket of the test's own, which is not made yet."""
    return replace(s3_settings, s3_bucket=f"leftovers-{secrets.token_hex(6)}")


def fill(settings: Settings) -> tuple[ObjectStore, float]:
    """A store with four inputs and something else, and when it had the last one."""
    objects = ObjectStore(settings)
    objects.ensure_bucket()
    for key in (f"{INPUTS}/t/r/1", f"{INPUTS}/t/r/2", DEAD, JOB, OTHER):
        objects.put(key, b"input")
    return objects, max(each.modified for each in objects.each(""))


def test_what_is_old_enough_is_removed_and_nothing_else(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remove_leftovers(settings, 1e12) == 0  # there is no bucket
    objects, newest = fill(settings)
    assert remove_leftovers(settings, newest + DAY_S) == 0
    monkeypatch.setattr(leftover_inputs, "REMOVED_MAX", 1)
    day_later = newest + DAY_S + 3602
    assert [remove_leftovers(settings, day_later) for _ in range(3)] == [1, 1, 0]
    assert [each.key for each in objects.each("")] == [DEAD, JOB, OTHER]
    week_later = day_later + 6 * DAY_S
    assert remove_leftovers(replace(settings, job_max_age_s=30 * DAY_S), week_later) == 1  # a job may wait for so long
    assert [each.key for each in objects.each("")] == [JOB, OTHER]
    assert remove_leftovers(settings, week_later) == 1
    assert [each.key for each in objects.each("")] == [OTHER]


def test_a_sweep_comes_again_and_again_and_a_store_that_is_away_ends_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, _ = fill(settings)
    times: list[float] = []

    def sweep(settings: Settings, now: float) -> int:
        times.append(now)
        if len(times) == 1:
            raise ObjectsUnavailable("away")
        return remove_leftovers(settings, now + 2 * DAY_S)

    monkeypatch.setattr(leftover_inputs, "remove_leftovers", sweep)

    async def work() -> None:
        leftovers = LeftoverInputs(settings)
        for now in (0.0, EVERY_S - 1, EVERY_S):
            leftovers.step(now)
            while (task := leftovers._task) is not None and not task.done():
                await asyncio.wait({task})
        await leftovers.close()

    asyncio.run(work())
    assert len(times) == 2
    assert [each.key for each in objects.each("")] == [DEAD, JOB, OTHER]


def test_uploads_that_were_never_completed_leave_nothing(settings: Settings) -> None:
    objects, _ = fill(settings)
    for key in ("files/t/f", OTHER, "anothers/x"):
        objects._client._create_multipart_upload(settings.s3_bucket, key, {})
    now = time.time()

    def left() -> list[str]:
        found = objects._client._list_multipart_uploads(settings.s3_bucket)
        return sorted(each.object_name for each in found.uploads)

    assert remove_leftovers(settings, now) == 0
    assert left() == ["anothers/x", "files/t/f", OTHER]
    assert remove_leftovers(settings, now + UPLOAD_S + 60) == 2
    assert left() == ["anothers/x"]
