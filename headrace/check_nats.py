"""Whether a NATS that somebody else runs can be used: tried once before the stack starts, whose processes would try on."""

import asyncio

from msgspec.structs import replace

from shared.bus import Bus
from shared.errors import Unavailable
from shared.settings import Settings
from shared.streams import ApiError

CONNECT_S = 5.0
JETSTREAM_S = 10.0  # an election of a stream's leader takes as long


def check(settings: Settings) -> None:
    """Connect, and make the streams and buckets. Raises Unavailable and SettingsError with what is wrong, in a line."""
    asyncio.run(_check(replace(settings, publish_timeout_s=min(settings.publish_timeout_s, JETSTREAM_S))))


async def _check(settings: Settings) -> None:
    bus = await Bus.connect(settings, "check", CONNECT_S)
    try:
        await bus.ensure()
    except Unavailable as error:
        said = [error.message, *([bus.refusal] if bus.refusal else [])]
        if not isinstance(error, ApiError):
            said.append("is JetStream on, and may this user ask it?")
        raise Unavailable(f"NATS at {settings.nats_shown} cannot be used: {'; '.join(said)}") from None
    finally:
        await bus.close()
