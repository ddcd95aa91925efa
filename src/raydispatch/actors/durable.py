"""What is durable: publishing into the journal, reading from it, dead letters, replay. Verbs of a system."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from ray import cloudpickle

from raydispatch.actors.front import FrontEngine
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import LetterFilter, unpack_letter
from raydispatch.delivery.reader import Reader
from raydispatch.delivery.subscription import Start
from raydispatch.dispatch.outcome import Receipt
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import Delivery

T = TypeVar("T")

PICKLE = 0x80
BATCH = 4_000
"""Messages of one call to the keeper."""
WINDOW = 6
"""Such calls under way."""
CONTROL_SECONDS = 30.0


class DurableVerbs:
    """What `DispatchSystem` does with its journal."""

    _front: FrontEngine
    _loop: asyncio.AbstractEventLoop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _ask(self, method: str, *arguments: object) -> Any:
        raise NotImplementedError

    @property
    def has_journal(self) -> bool:
        """Whether messages can be published durably."""
        return self._front.settings.journal is not None

    def publish(
        self, topic: str, envelope: Envelope[Any], *, durable: bool = False, deliver_at: datetime | None = None
    ) -> Receipt:
        """Accept a message, and return at once; it is delivered in the background.

        With `durable`, it returns when the journal has the message, which then survives every process; each dispatcher
        gets it by its own `delivery`, not before `deliver_at`.
        """
        return self._call(self._front.publish(topic, envelope, durable=durable, deliver_at=deliver_at))

    async def publish_async(
        self, topic: str, envelope: Envelope[Any], *, durable: bool = False, deliver_at: datetime | None = None
    ) -> Receipt:
        """As `publish`; what is published at the same time goes into the journal together."""
        return await self._front.publish(topic, envelope, durable=durable, deliver_at=deliver_at)

    def publish_many(
        self,
        messages: Iterable[tuple[str, Envelope[Any]]],
        *,
        durable: bool = False,
        deliver_at: datetime | None = None,
    ) -> list[Receipt]:
        """As `publish`, for many: a few batches are under way at a time."""
        receipts: list[Receipt] = []
        calls: deque[Future[list[Receipt]]] = deque()
        source = iter(messages)
        while True:
            while len(calls) < WINDOW and (batch := list(islice(source, BATCH))):
                work = self._front.publish_many(batch, durable=durable, deliver_at=deliver_at)
                calls.append(asyncio.run_coroutine_threadsafe(work, self._loop))
            if not calls:
                return receipts
            receipts += calls.popleft().result()

    async def publish_many_async(
        self,
        messages: Sequence[tuple[str, Envelope[Any]]],
        *,
        durable: bool = False,
        deliver_at: datetime | None = None,
    ) -> list[Receipt]:
        """As `publish_many`, in one batch."""
        return await self._front.publish_many(messages, durable=durable, deliver_at=deliver_at)

    async def consume(
        self,
        name: str,
        topics: str = "**",
        *,
        delivery: Delivery | None = None,
        start: Start | None = None,
    ) -> Reader:
        """Read durable messages in this process, and acknowledge each; for event loops.

        Readers of one name share its messages, by its `delivery`, from whatever processes. A new subscription begins at
        `start` (an offset, a datetime, "first" or "head"), one that is known where it was.
        """
        return await self._front.consume(name, topics, delivery=delivery, start=start)

    def replay(self, name: str, start: Start) -> int:
        """Let a dispatcher, or the readers of a name, get everything again from there; the offset.

        Its handlers run, though the messages are remembered.
        """
        return int(self._call(self._front.remote_keeper().ask("replay", name, start)))

    def dead_letters(
        self,
        dispatcher_id: str | None = None,
        *,
        error_type: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        message_id: UUID | None = None,
    ) -> list[DeadLetter]:
        """Messages that dispatchers could not handle: all that the journal has; without one, the last 1,000."""
        wanted = LetterFilter(dispatcher_id, error_type, key, since, until, message_id)
        found = [_letter(letter) for letter in self._ask("dead_letters")]
        found = [letter for letter in found if wanted.takes(letter)]
        if self._front.settings.journal is not None:
            kept = self._call(self._front.remote_keeper().ask("letters", wanted))
            found = [*map(unpack_letter, kept), *found]
        return found

    def redrive(
        self,
        dispatcher_id: str | None = None,
        *,
        error_type: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        message_id: UUID | None = None,
    ) -> int:
        """Send dead letters again, each to the dispatcher that failed and with the same id; how many."""
        wanted = LetterFilter(dispatcher_id, error_type, key, since, until, message_id)
        return int(self._call(self._front.remote_keeper().ask("redrive", wanted)))

    def purge_dead_letters(
        self,
        dispatcher_id: str | None = None,
        *,
        error_type: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        message_id: UUID | None = None,
    ) -> int:
        """Let dead letters of the journal go; how many."""
        wanted = LetterFilter(dispatcher_id, error_type, key, since, until, message_id)
        return int(self._call(self._front.remote_keeper().ask("purge", wanted)))


def _letter(data: bytes) -> DeadLetter:
    """Of those in the controller's memory, most are pickled; others wait there for a keeper that is away."""
    letter: DeadLetter = cloudpickle.loads(data) if data[0] == PICKLE else unpack_letter(data)
    return letter
