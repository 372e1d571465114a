"""The audit log: what it says of actions that fail, and that it never stands in the way of one."""

import asyncio
import logging
import time
from typing import Any

import pytest

from shared import audit, subjects, tenants
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import VersionNotFound
from shared.log import configure_logging
from shared.settings import Settings

ME = Actor("t", "k1")


def test_what_fails_is_told_too_and_large_entries_are_cut(nats_server: Any) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        await bus.ensure()
        assert await audit.read(bus, 0.0) == []
        with pytest.raises(VersionNotFound):
            async with audit.audited(bus, ME, "version.change", "m@v"):
                raise VersionNotFound("no")
        with pytest.raises(ZeroDivisionError):
            async with audit.audited(bus, ME, "version.change", "m@v"):
                _ = 1 / 0
        async with audit.audited(bus, ME, "version.register", "x" * 70_000, source="y" * 70_000):
            pass
        middle = time.time()
        await bus.publish_durable(subjects.audit("version.change"), b"\xff", {"Nats-Msg-Id": "damaged"})
        async with audit.audited(bus, ME, "alias.set", "m@a", version="v") as note:
            note.detail["more"] = 1
        found = await audit.read(bus, 0.0)
        assert [entry.result for entry in found] == ["version_not_found", "internal_error", "ok", "ok"]
        assert found[2].target == "x" * audit.TARGET_SHOWN
        assert found[3].detail == {"version": "v", "more": 1}
        assert [entry.action for entry in await audit.read(bus, middle)] == ["alias.set"]
        assert await audit.read(bus, time.time() + 60) == []
        await bus.close()

    asyncio.run(main())


def test_no_action_waits_long_for_its_entry(nats_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        await bus.ensure()
        nats_server.kill()
        begun = time.monotonic()
        async with audit.audited(bus, ME, "alias.set", "m@a", version="v"):
            done = True
        assert done
        assert time.monotonic() - begun < audit.WRITE_S_MAX + 1
        await bus.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    [told] = [record.getMessage() for record in caplog.records if "audit log" in record.getMessage()]
    assert '"target":"m@a"' in told


def test_a_key_that_gets_into_a_log_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    root, key, secret = logging.getLogger(), tenants.new_key(), "whsec_" + "Ab+/" * 11
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging(Settings())
        try:
            raise ValueError(f"bad header: Bearer {key}")
        except ValueError:
            logging.getLogger("x").exception("sent %s, signed with %s", key, secret)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    written = capsys.readouterr().err
    assert "sent hr_..., signed with whsec_...\n" in written
    assert "Bearer hr_..." in written
    assert key[3:] not in written
    assert secret[6:] not in written
