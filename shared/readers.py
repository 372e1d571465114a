"""The streams of one process, and the frame addresses where they are spoken to."""

from collections.abc import Callable, Iterator
from functools import partial

from shared import subjects, wire
from shared.bus import Bus, Message, Subscription
from shared.errors import QueueFull
from shared.stream import Stream

READERS_MAX = 16  # of one request in one process


class Home:
    """One frame address, and what is served at it: a rid has one requester at an address at most."""

    __slots__ = ("address", "streams")

    def __init__(self, address: str) -> None:
        self.address = address
        self.streams: dict[str, Stream] = {}


class Readers:
    """All streams that have not ended. A second reader of a request has another address than the first one."""

    def __init__(self, bus: Bus, owner: str, on_batch: Callable[[Home, Message], None]) -> None:
        """`owner`: as the dispatcher's. `on_batch(home, message)`: what a worker says at an address."""
        self._bus, self._owner, self._on_batch = bus, owner, on_batch
        self._homes = [self._new_home()]

    @property
    def address(self) -> str:
        """Of every request that has one reader."""
        return self._homes[0].address

    def __len__(self) -> int:
        return sum(len(home.streams) for home in self._homes)

    def __iter__(self) -> Iterator[Stream]:
        for home in self._homes:
            yield from home.streams.values()

    async def start(self) -> None:
        self._subscription = await self._listen(self._homes[0])

    def of(self, rid: str) -> list[Stream]:
        """The streams of one request."""
        return [home.streams[rid] for home in self._homes if rid in home.streams]

    async def home_for(self, rid: str) -> Home:
        """An address that has no reader of the request yet. Raises QueueFull."""
        for home in self._homes:
            if rid not in home.streams:
                return home
        if len(self._homes) >= READERS_MAX:
            raise QueueFull(f"the request {rid} has {READERS_MAX} readers here, which is the limit", retry_after=1.0)
        home = self._new_home()
        await self._listen(home)
        self._homes.append(home)
        return home

    def forget(self, stream: Stream) -> None:
        for home in self._homes:
            if home.streams.get(stream.rid) is stream:
                del home.streams[stream.rid]
                return

    def _new_home(self) -> Home:
        return Home(subjects.frame_address(self._owner, wire.new_id()))

    async def _listen(self, home: Home) -> Subscription:
        return await self._bus.subscribe(home.address, partial(self._on_batch, home))
