"""The audit log: who told the platform to change what, when, and what came of it, in the stream `AUDIT`.

One entry for each control action, written after it by whoever took it. Writing never fails an action and never holds it up for
longer than WRITE_S_MAX: an entry that cannot be stored is in the log of the process. Secrets and prompts are never in it.
"""

import asyncio
import contextlib
import getpass
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shared import reading, subjects, tenants, webhooks
from shared.errors import HeadraceError, Internal
from shared.rollouts import Command, Deployment, NewDeployment
from shared.wire import HEADER_MSG_ID, new_id

if TYPE_CHECKING:
    from shared.bus import Bus, Message

log = logging.getLogger(__name__)

WRITE_S_MAX = 2.0
ENTRY_BYTES_MAX = 16 * 1024
TARGET_SHOWN = 300  # characters, of an entry that is over it
OK = "ok"

Action = Literal[
    "version.register",
    "version.change",
    "version.remove",
    "alias.set",
    "alias.remove",
    "deployment.create",
    "deployment.rollback",
    "deployment.pause",
    "deployment.resume",
    "deployment.promote",
    "tenant.add",
    "tenant.change",
    "tenant.remove",
    "key.issue",
    "key.rotate",
    "key.revoke",
    "webhook_secret.rotate",
]


COMMANDS: dict[Command, Action] = {
    "rollback": "deployment.rollback",
    "pause": "deployment.pause",
    "resume": "deployment.resume",
    "promote": "deployment.promote",
}


class Actor(msgspec.Struct, frozen=True):
    """Who acts: the tenant, and the id of its key, `local` (HTTP without keys) or `cli:<user>@<host>`."""

    tenant: str
    by: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the audit log."""

    at: float  # unix seconds, when the action ended
    tenant: str
    by: str
    action: Action
    target: str  # `model@version`, a deployment's id, a tenant, ...
    result: str = OK  # or the code of the error
    detail: dict[str, Any] = {}


class Note:
    """What an action adds to its entry while it goes on."""

    def __init__(self, target: str, detail: dict[str, Any]) -> None:
        self.target, self.detail = target, detail


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Entry).decode


def cli_actor() -> Actor:
    """Who runs this command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user here, as in some containers
        user = str(os.getuid())
    return Actor(subjects.LOCAL_TENANT, f"cli:{user}@{socket.gethostname()}")


@contextlib.asynccontextmanager
async def audited(bus: "Bus", actor: Actor, action: Action, target: str, **detail: Any) -> AsyncIterator[Note]:
    """Write down what the body does and what comes of it. `detail` is small and holds no secret."""
    note, result = Note(target, detail), OK
    try:
        yield note
    except HeadraceError as error:
        result = error.code
        raise
    except BaseException as error:
        result = "cancelled" if isinstance(error, asyncio.CancelledError) else Internal.code
        raise
    finally:
        await _write(
            bus,
            Entry(
                at=time.time(),
                tenant=actor.tenant,
                by=actor.by,
                action=action,
                target=note.target,
                result=result,
                detail=note.detail,
            ),
        )


def alias(
    bus: "Bus", actor: Actor, model: str, name: str, version: str | None
) -> contextlib.AbstractAsyncContextManager[Note]:
    """Around `registry.set_alias`."""
    if version is None:
        return audited(bus, actor, "alias.remove", f"{model}@{name}")
    return audited(bus, actor, "alias.set", f"{model}@{name}", version=version)


def deployment(bus: "Bus", actor: Actor, asked: NewDeployment) -> contextlib.AbstractAsyncContextManager[Note]:
    """Around `deployments.create`, which tells the target."""
    detail = msgspec.to_builtins(asked)
    if asked.webhook is not None:  # its path and its secret are nobody's else
        detail["webhook"] = webhooks.host_of(asked.webhook.url)
    return audited(bus, actor, "deployment.create", "", **detail)


def command(bus: "Bus", actor: Actor, about: Deployment, what: Command) -> contextlib.AbstractAsyncContextManager[Note]:
    """Around `deployments.command`."""
    return audited(bus, actor, COMMANDS[what], about.id, model=about.model, version=about.version)


async def _write(bus: "Bus", entry: Entry) -> None:
    data = tenants.redacted(_encode(entry).decode()).encode()  # a key in the place of a name
    if len(data) > ENTRY_BYTES_MAX:
        short = msgspec.structs.replace(entry, target=entry.target[:TARGET_SHOWN], detail={"bytes": len(data)})
        data = tenants.redacted(_encode(short).decode()).encode()
    try:
        async with asyncio.timeout(WRITE_S_MAX):
            await bus.publish_durable(subjects.audit(entry.action), data, {HEADER_MSG_ID: new_id()})
    except (HeadraceError, TimeoutError) as error:
        log.error("not in the audit log (%r): %s", error, data.decode())


async def read(bus: "Bus", since: float) -> list[Entry]:
    """The entries from `since` (unix seconds) on, the oldest first. Raises Unavailable."""
    found: list[Entry] = []

    def take(message: "Message") -> None:
        try:
            found.append(_decode(message.data))
        except (ValueError, RecursionError) as error:
            log.warning("an entry of the audit log is left out: %s", error)

    await reading.read_since(bus, subjects.AUDIT_STREAM, since, take)
    return found
