"""Settings of a version that is served: what can be changed, and what is refused."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shared import records
from shared.config import changed, engine_digest
from shared.errors import BadRequest, VersionRetired
from shared.records import EngineSettings, Version, VersionLimits
from shared.schedules import is_open, min_replicas

RECORD = Version(model="m", version="v", state="available", source="sim:zero", limits=VersionLimits(min_replicas=1))
MONDAY = 4 * 86_400  # 5 January 1970
OFFICE = {"days": ["mon", "fri"], "from": "08:00", "to": "18:00", "min_replicas": 4}


def test_limits_and_engine_settings_change_and_none_is_the_default() -> None:
    after = changed(RECORD, {"max_replicas": 3, "warm": "2", "min_replicas": None}, {"slots": "32"})
    assert after.limits == VersionLimits(max_replicas=3, warm=2)
    assert after.engine == EngineSettings(slots=32)
    assert changed(after, {}, {"slots": None}).engine == EngineSettings()
    assert changed(RECORD, {}, {}) == RECORD


def test_a_schedule_survives_the_record() -> None:
    after = changed(RECORD, {"schedule": [OFFICE]}, {})
    assert records.decode_version(records.encode(after)) == after
    assert after.limits.schedule[0].days == ("mon", "fri")


@pytest.mark.parametrize(
    ("limits", "engine", "what"),
    [
        ({"min_replicas": -1}, {}, "min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, {}, "over max_replicas"),
        ({"max_replicas": 0}, {}, "over max_replicas"),
        ({"min_replicas": 10**9}, {}, "min_replicas"),
        ({"warm": 10**9}, {}, "warm"),
        ({"idle_seconds": float("nan")}, {}, "idle_seconds"),
        ({"priority": 101}, {}, "priority"),
        ({"minimum": 1}, {}, "no setting 'minimum'"),
        ({"schedule": [OFFICE | {"from": "8:00"}]}, {}, r"^limits.schedule\[0\].from: a time of the day is expected"),
        ({"schedule": [OFFICE | {"days": []}]}, {}, "no days"),
        ({"schedule": [OFFICE], "max_replicas": 2}, {}, "over max_replicas"),
        ({"schedule": [OFFICE | {"min_replicas": 10**9}]}, {}, "min_replicas"),
        (
            {"schedule": [OFFICE | {"days": ["someday"]}]},
            {},
            r"^limits.schedule\[0\].days\[0\]: invalid enum value .*, mon, ",
        ),
        ({}, {"slots": "many"}, "^engine.slots: expected `int"),
        ({}, {"dtype": "float8"}, "^engine.dtype: .* one of auto, bfloat16, float16, float32 is expected"),
        ({}, {"ttft_ms_target": 0}, "ttft_ms_target"),
        ({}, {"ttft_ms_target": "inf"}, "ttft_ms_target"),  # would be stored as none at all
    ],
)
def test_what_is_no_setting_or_no_value_is_refused(limits: dict[str, Any], engine: dict[str, Any], what: str) -> None:
    with pytest.raises(BadRequest, match=what):
        changed(RECORD, limits, engine)


def test_a_failed_version_gets_another_try_when_its_engine_settings_change() -> None:
    failed = replace(RECORD, state="failed", reason="out of memory")
    assert changed(failed, {"warm": 1}, {}).state == "failed"
    again = changed(failed, {}, {"kv_blocks": 100})
    assert (again.state, again.reason) == ("registered", "")


def test_the_digest_is_of_what_the_settings_say() -> None:
    same = msgspec.json.decode(msgspec.json.encode(EngineSettings(slots=4)), type=EngineSettings)
    assert engine_digest(same) == engine_digest(EngineSettings(slots=4))
    assert engine_digest(same) != engine_digest(EngineSettings(slots=5))


def test_a_window_is_open_on_its_days_also_past_midnight_and_past_the_week() -> None:
    (office,) = changed(RECORD, {"schedule": [OFFICE]}, {}).limits.schedule
    at = {"before": 7.99, "from": 8.0, "within": 12.0, "to": 18.0, "tuesday": 24 + 12.0, "friday": 4 * 24 + 12.0}
    opened = {name: is_open(office, MONDAY + hours * 3600) for name, hours in at.items()}
    assert opened == {
        "before": False, "from": True, "within": True, "to": False, "tuesday": False, "friday": True
    }  # fmt: skip
    night = {"days": ["sun"], "from": "22:00", "to": "06:00", "min_replicas": 2}
    schedule = changed(RECORD, {"schedule": [OFFICE, night]}, {}).limits.schedule
    assert min_replicas(schedule, MONDAY + 5.9 * 3600) == 2
    assert min_replicas(schedule, MONDAY + 6.0 * 3600) == 0
    assert min_replicas(schedule, MONDAY + 9 * 3600) == 4
    assert min_replicas(schedule, MONDAY + 7 * 86_400 - 3600) == 2


def test_a_removed_version_cannot_be_changed() -> None:
    with pytest.raises(VersionRetired, match="m@v was removed"):
        changed(replace(RECORD, state="retired"), {"warm": 1}, {})
