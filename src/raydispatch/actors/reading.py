"""A reader in any process of the cluster: fetches its messages from the keeper, and tells what became of them."""

import asyncio
from contextlib import suppress

from raydispatch.actors.keeper import Pulled, Settled
from raydispatch.actors.keeping import RemoteKeeper
from raydispatch.delivery.consumer import ACKED, Verdict
from raydispatch.delivery.reader import Delivered, Reader, unreadable
from raydispatch.delivery.subscription import Start
from raydispatch.errors import DispatchError, NotRegistered
from raydispatch.messages.stored import restored
from raydispatch.settings import Delivery

PULL_SECONDS = 1.0
"""How long a fetch waits for messages; it says at the same time that the reader is alive."""
TOGETHER_SECONDS = 0.002
"""How long acknowledgements gather."""
AWAY_SECONDS = 30.0


class RemoteReader(Reader):
    """As every reader; two calls to the keeper are under way at most, one that fetches and one that tells."""

    def __init__(self, keeper: RemoteKeeper, name: str, topics: str, delivery: Delivery, start: Start | None) -> None:
        super().__init__(name, "", self._goodbye)
        self._keeper = keeper
        self._order = (name, topics, delivery, start)
        self._settled = Settled([], [])
        self._most = max(1, delivery.window)
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> "RemoteReader":
        """Join the subscription."""
        self.consumer_id = await self._keeper.ask("consume", *self._order)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._fetch()), loop.create_task(self._report())]
        return self

    async def _fetch(self) -> None:
        try:
            while True:
                room = max(1, self._most - len(self._waiting))
                try:
                    pulled = await self._keeper.ask("pull", self.consumer_id, room, PULL_SECONDS, seconds=AWAY_SECONDS)
                except NotRegistered:
                    # The keeper was started again, or has not heard of us for too long: what we held is others' now.
                    self._waiting.clear()
                    self._settled = Settled([], [])
                    again = (*self._order[:3], None)  # From where it was, and not from where it began once.
                    self.consumer_id = await self._keeper.ask("consume", *again, seconds=AWAY_SECONDS)
                    continue
                self._waiting.extend(self._delivered(pulled))
                self._arrived.set()
        except Exception as error:  # Whatever it is, nobody else would hear of it.
            self._error = error
            self._arrived.set()

    async def _report(self) -> None:
        while True:
            await self._has_news.wait()
            await asyncio.sleep(TOGETHER_SECONDS)
            self._has_news.clear()
            settled, self._settled = self._settled, Settled([], [])
            with suppress(DispatchError):  # Those who fetch hear of it, too.
                await self._keeper.ask("settle", self.consumer_id, settled, seconds=AWAY_SECONDS)

    def _delivered(self, pulled: Pulled) -> list[Delivered]:
        found = []
        settle = self._settle
        for code, offset, blob, deliveries in zip(*pulled[1:], strict=True):
            try:
                envelope = restored(blob, *pulled.keys[code])
            except Exception as error:
                self._settled.others.append((offset, unreadable(error)))
                self._has_news.set()
                continue
            if deliveries:
                envelope = envelope.with_attempt(envelope.attempt + deliveries)
            found.append(Delivered(envelope, offset, settle))
        return found

    def _settle(self, message: Delivered, verdict: Verdict) -> None:
        if verdict is ACKED:
            self._settled.acked.append(message.offset)
        else:
            self._settled.others.append((message.offset, verdict))
        self._has_news.set()

    async def _goodbye(self) -> None:
        for task in self._tasks:
            task.cancel()
        with suppress(DispatchError):
            await self._keeper.ask("leave", self.consumer_id, self._settled)
