"""What there is to tell webhooks of deployments. Only the controller that leads writes the notices.

A deployment has its history in its record, so each leader goes through those that it has not told yet; what another one wrote
before is refused by its id, and what is older than a day is history.
"""

import asyncio
import contextlib
import logging

from controller.webhooks import Webhooks
from shared import notices, rollouts, subjects, webhooks
from shared.background import end
from shared.bus import Bus
from shared.errors import BadRequest, Unavailable
from shared.keyvalue import Watch
from shared.leadership import Leadership
from shared.rollouts import Deployment, Event
from shared.settings import Settings, SettingsError
from shared.webhooks import EVENT_TYPES, EventType, Webhook

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks whether this controller leads

_TYPES: dict[str, EventType] = {type_: type_ for type_ in EVENT_TYPES}


def operators_webhook(settings: Settings) -> Webhook | None:
    """The one that is told of every deployment; None: there is none. Raises SettingsError."""
    if not settings.deployment_webhook_url:
        return None
    webhook = Webhook(url=settings.deployment_webhook_url, secret=settings.deployment_webhook_secret)
    try:
        webhooks.check(webhook, settings.webhook_private_hosts, "deployment_webhook")
    except BadRequest as error:
        raise SettingsError(error.message.replace("deployment_webhook.", "deployment_webhook_", 1)) from None
    return webhook


class DeploymentEvents:
    """Watches the deployments, and tells while this controller leads."""

    def __init__(self, bus: Bus, leader: Leadership, settings: Settings, webhooks: Webhooks) -> None:
        """Raises SettingsError."""
        self._bus, self._leader, self._webhooks = bus, leader, webhooks
        self._operators = operators_webhook(settings)
        self._deployments: dict[str, Deployment] = {}
        self._told: dict[str, int] = {}  # by deployment: the serial of the last event that its webhooks are told of
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises Unavailable."""
        self._watch = await self._bus.watch(subjects.DEPLOYMENTS_BUCKET, self._on_deployment)
        self._task = asyncio.create_task(self._run(), name="webhooks of deployments")

    async def close(self) -> None:
        await end(self._task)
        if self._watch is not None:
            await self._watch.close()

    def _on_deployment(self, key: str, value: bytes | None) -> None:
        if rollouts.DEPLOYMENTS.follow(self._deployments, key, value):
            self._told = {id_: serial for id_, serial in self._told.items() if id_ in self._deployments}
            self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if self._leader.leads:
                try:
                    for each in list(self._deployments.values()):
                        if self._told.get(each.id, 0) < each.serial:
                            await self._tell(each)
                except Unavailable as error:
                    log.info("webhooks are not told of deployments yet: %s", error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def _tell(self, deployment: Deployment) -> None:
        first = deployment.serial - len(deployment.events) + 1
        for serial, event in enumerate(deployment.events, first):
            if serial <= self._told.get(deployment.id, 0):
                continue
            type_ = _TYPES[f"deployment.{event.state}"]
            told = notices.Event(type_, deployment.id, event.at, data_of(deployment, event), serial)
            if deployment.webhook is not None:
                await self._webhooks.tell(deployment.tenant, deployment.webhook, told)
            if self._operators is not None:
                await self._webhooks.tell(notices.OPERATOR, self._operators, told)
            self._told[deployment.id] = serial


def data_of(deployment: Deployment, event: Event) -> dict[str, object]:
    """What is told of an event."""
    return {
        "id": deployment.id,
        "model": deployment.model,
        "version": deployment.version,
        "stable": deployment.stable,
        "status": event.state,
        "traffic_pct": event.pct,
        "reason": event.reason,
    }
