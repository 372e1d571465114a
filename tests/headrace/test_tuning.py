"""`headrace models set` and `decisions`: what is read from a command line, and how it is shown."""

from typing import Any

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from headrace import tuning
from headrace.cli import app
from shared import records, subjects
from shared.bus import Bus
from shared.config import changed
from shared.records import ScalingDecision, Signals, Version
from shared.settings import Settings

RECORD = Version(model="m", version="v", state="available", source="sim:zero")


def test_a_window_of_a_schedule_is_read_and_shown() -> None:
    found = tuning.window("mon-fri,sun 08:00-18:30=4")
    assert found["days"] == ["mon", "tue", "wed", "thu", "fri", "sun"]
    assert (found["from"], found["to"], found["min_replicas"]) == ("08:00", "18:30", 4)
    assert tuning.window("sat-mon 00:00-00:00=1")["days"] == ["sat", "sun", "mon"]
    assert len(tuning.window("22:00-06:00=2")["days"]) == 7
    after = changed(RECORD, {"schedule": [tuning.window("mon,tue 08:00-18:00=4")], "warm": 1}, {"slots": 32})
    assert tuning.config_lines(after) == [
        "m@v limits: warm=1 schedule=mon,tue 08:00-18:00=4",
        "m@v engine: slots=32",
    ]
    assert tuning.config_lines(RECORD)[0] == "m@v limits: as by default"


@pytest.mark.parametrize("text", ["08:00-18:00", "funday 08:00-18:00=1", "mon 8:00-18:00=1", "mon 08:00=1", ""])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        tuning.window(text)


def test_a_target_is_a_model_and_a_version() -> None:
    assert tuning.named("chat@v1") == ("chat", "v1")
    for wrong in ("chat", "@v1", "chat@"):
        with pytest.raises(typer.BadParameter):
            tuning.named(wrong)


def test_a_decision_is_one_line() -> None:
    signals = Signals(pending=5, claimed=0, rate=2.5, replicas=1)
    decision = ScalingDecision(at=0.0, model="m", version="v", before=1, desired=3, reasons=["drain"], signals=signals)
    assert tuning.decision_line(decision) == "1 -> 3 (drain): pending=5 rate=2.5 replicas=1"
    assert tuning.decision_line(replace(decision, spares=2)).startswith("1 -> 3, spares 0 -> 2 (drain)")
    assert (
        tuning.decision_line(replace(decision, signals=Signals()), spares_before=1) == "1 -> 3, spares 1 -> 0 (drain)"
    )


def test_the_commands_change_the_record_and_read_the_decisions(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setenv("HEADRACE_NATS_URL", nats_url)
    key = subjects.key("tuned", "v1")

    async def with_bus(work: Any) -> Any:
        bus = await Bus.connect(Settings(nats_url=nats_url), "test")
        try:
            await bus.ensure()
            return await work(bus)
        finally:
            await bus.close()

    async def prepare(bus: Bus) -> None:
        record = replace(RECORD, model="tuned", version="v1")
        await bus.kv_put(subjects.MODELS_BUCKET, key, records.encode(record))
        decision = ScalingDecision(at=1e9, model="tuned", version="v1", before=0, desired=1, reasons=["first_message"])
        await bus.kv_put(subjects.DECISIONS_BUCKET, key, records.encode(decision))

    def command(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["models", *arguments])

    asyncio.run(with_bus(prepare))
    ran = command("set", "tuned@v1", "--min-replicas", "2", "--set", "slots=32", "--schedule", "mon 08:00-09:00=3")
    assert ran.exit_code == 0, ran.output
    assert "min_replicas=2 schedule=mon 08:00-09:00=3" in ran.output
    assert "slots=32" in ran.output
    stored = asyncio.run(with_bus(lambda bus: bus.kv_get(subjects.MODELS_BUCKET, key)))
    assert records.decode_version(stored[0]).limits.min_replicas == 2
    ran = command("set", "tuned@v1", "--unset", "min-replicas", "--unset", "slots")
    assert ran.exit_code == 0, ran.output
    assert "min_replicas=2" not in ran.output
    assert "slots=32" not in ran.output
    assert command("set", "tuned@v1", "--warm", "1", "--unset", "warm").exit_code == 2
    assert command("set", "tuned@v1").exit_code == 2
    for elsewhere in (["models", "list"], ["dlq", "list"], ["status"]):
        assert CliRunner().invoke(app, ["--url", "http://127.0.0.1:9", *elsewhere]).exit_code == 2
    assert command("set", "tuned@v1", "--unset", "colour").exit_code == 2
    assert "2001-09-09 01:46:40Z 0 -> 1 (first_message)" in command("decisions", "tuned@v1").output
    listed = command("show", "tuned@v1").output
    assert "tuned@v1 engine: as by default" in listed
    assert str(command("show", "tuned@v2").exception) == "tuned has no version v2"
    asyncio.run(with_bus(lambda bus: bus.kv_delete(subjects.DECISIONS_BUCKET, key)))
    assert "nothing was decided on tuned@v1" in command("decisions", "tuned@v1").output
    unknown = command("decisions", "tuned@v2")
    assert (unknown.exit_code, str(unknown.exception)) == (1, "there is no tuned@v2")
