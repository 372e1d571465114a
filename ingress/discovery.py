"""This ingress as a service that NATS's own tools find (`nats micro info headrace`): PING and INFO of the micro protocol."""

from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec

from shared import subjects, wire
from shared.background import Background
from shared.bus import Bus, Message, Subscription

DESCRIPTION = "Inference by any ingress of Headrace"
ENDPOINTS = ("infer.*", "cancel", "resume", "route", "whoami", "jobs.*")


class Discovery:
    """One process's answers."""

    def __init__(self, bus: Bus, queue: str) -> None:
        self._bus, self._queue = bus, queue
        self._id = wire.new_id()
        self._sending = Background()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        for verb, answer in (("PING", self._ping()), ("INFO", self._info())):
            data = msgspec.json.encode(answer)
            for subject in subjects.discovery(verb, self._id):
                self._subscriptions.append(await self._bus.subscribe(subject, partial(self._answer, data)))

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _answer(self, data: bytes, message: Message) -> None:
        if message.reply:
            self._sending.do(self._bus.publish(message.reply, data))

    def _ping(self) -> dict[str, Any]:
        said = {"name": subjects.SERVICE_NAME, "id": self._id, "version": version("headrace"), "metadata": {}}
        return {"type": "io.nats.micro.v1.ping_response", **said}

    def _info(self) -> dict[str, Any]:
        endpoints = [
            {"name": name.partition(".")[0], "subject": f"headrace.{name}", "queue_group": self._queue, "metadata": {}}
            for name in ENDPOINTS
        ]
        said = {"description": DESCRIPTION, "endpoints": endpoints}
        return self._ping() | {"type": "io.nats.micro.v1.info_response", **said}
