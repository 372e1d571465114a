"""What there is to tell webhooks of jobs: their results, from a durable consumer of which only the controller that leads pulls.

A result is acked when its notice is written, or when nobody is to be told. The consumer brings no bodies: a batch has thousands
of results, and none of them is anybody's news.
"""

import asyncio
import logging

from controller.webhooks import Webhooks
from shared import job_events, job_records, results, subjects, wire
from shared.background import Background
from shared.bus import Bus, Message
from shared.errors import HeadraceError, Unavailable
from shared.leadership import Leadership
from shared.notices import Event
from shared.pull import Puller
from shared.streams import SECOND

log = logging.getLogger(__name__)

AT_ONCE = 64
AGAIN_S = 1.0  # after which a result that could not be looked at comes again
ACK = b"+ACK"
LATER = b'-NAK {"delay": %d}' % int(AGAIN_S * SECOND)


class JobEvents:
    """Pulls results, and tells."""

    def __init__(self, bus: Bus, leader: Leadership, webhooks: Webhooks) -> None:
        self._bus, self._leader, self._webhooks = bus, leader, webhooks
        self._puller: Puller | None = None
        self._tasks = Background()

    async def start(self) -> None:
        """Raises Unavailable."""
        consumer = await self._bus.ensure_results_consumer()
        self._puller = Puller(self._bus, subjects.RES_STREAM, consumer, self._free, self._on_result)
        await self._puller.start()

    async def close(self) -> None:
        """What was not acked comes to the next leader."""
        if self._puller is not None:
            await self._puller.stop()
        await self._tasks.close()

    def _free(self) -> int:
        return AT_ONCE - len(self._tasks) if self._leader.leads else 0

    def _on_result(self, message: Message) -> None:
        self._tasks.do(self._take(message)).add_done_callback(self._done)

    def _done(self, _: asyncio.Task[None]) -> None:
        if self._puller is not None:
            self._puller.pump()

    async def _take(self, message: Message) -> None:
        try:
            await self._tell(message)
        except Unavailable as error:
            log.info("webhooks are not told of %s yet: %s", message.subject, error.message)
            await self._bus.publish(message.reply, LATER)
            return
        except (HeadraceError, ValueError) as error:  # what cannot be read now never can
            log.error("webhooks are not told of %s: %s", message.subject, error)
        await self._bus.publish(message.reply, ACK)

    async def _tell(self, message: Message) -> None:
        if wire.HEADER_TTL not in message.headers:
            return  # it has no time of its own: it is of no job that has a record, but a line of a batch
        tenant, job = subjects.place_of_result(message.subject)
        record = await job_records.read(self._bus, tenant, job)
        if record is None or record.webhook is None:
            return
        result = await results.read_result(self._bus, tenant, job)
        if result is None:
            return  # it was deleted
        event = Event(
            job_events.type_of(record, result),
            job_events.subject_of(record),
            result.ended_at,
            job_events.data_of(record, result),
        )
        await self._webhooks.tell(tenant, record.webhook, event)
