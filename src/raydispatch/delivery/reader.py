"""A reader: a consumer that is no dispatcher, but a loop in some program."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from raydispatch.delivery.consumer import ACKED, Ending, Item, Tell, Verdict
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception, sanitize
from raydispatch.errors import ErrorCode, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import restored


class Delivered:
    """A message in the hands of a reader, who says what became of it: once, at any time.

    Example: `async for message in reader: store(message.envelope); message.ack()`.
    """

    __slots__ = ("_settle", "envelope", "offset")

    def __init__(self, envelope: Envelope[Any], offset: int, settle: "Callable[[Delivered, Verdict], None]") -> None:
        self.envelope = envelope
        self.offset = offset
        """Its number in the journal."""
        self._settle = settle

    def ack(self) -> None:
        """It is done."""
        self._settle(self, ACKED)

    def nack(self, delay_seconds: float | None = None) -> None:
        """It failed: again later, with a higher attempt; as a dead letter, if that was its last try."""
        self._settle(self, Verdict(Ending.FAILED, _rejected("the reader could not handle it"), delay_seconds))

    def reject(self, reason: str) -> None:
        """It will always fail: a dead letter."""
        self._settle(self, Verdict(Ending.FAILED, _rejected(sanitize(reason)), is_final=True))


class Reader:
    """An async iterator of messages, each to be acknowledged. Made by `consume`.

    Example: `async with await engine.consume("feed", "orders.**") as reader: async for message in reader: …`
    """

    def __init__(self, subscription: str, consumer_id: str, leave: Callable[[], Awaitable[None]]) -> None:
        self.subscription = subscription
        self.consumer_id = consumer_id
        self._leave = leave
        self._waiting: deque[Delivered] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._error: BaseException | None = None

    async def batch(self, most: int = 1_000) -> list[Delivered]:
        """What is there, so much at most; waits for the first. Nothing, when the reader was closed."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        if most >= len(self._waiting):
            taken = list(self._waiting)
            self._waiting.clear()
            return taken
        return [self._waiting.popleft() for _ in range(most)]

    async def close(self) -> None:
        """Take no more; what was not acknowledged goes to others, or waits for the next reader."""
        if not self._is_closed:
            self._is_closed = True
            self._waiting.clear()
            self._arrived.set()
            await self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivered:
        for message in await self.batch(1):
            return message
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class LocalReader(Reader):
    """A reader in the process that owns the journal: itself the consumer."""

    def __init__(self, subscription: str, consumer_id: str, leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(subscription, consumer_id, leave)
        self._loop = asyncio.get_running_loop()
        self._items: dict[Delivered, Item] = {}
        """Of what nobody has settled yet. By the delivery and not by the offset: a late word is for an old one."""
        self._tell: Tell | None = None

    def is_well(self) -> bool:
        """Whether it can take messages now."""
        return not self._is_closed

    def take(self, items: list[Item], tell: Tell) -> None:
        """Hold them ready for the loop that reads."""
        self._tell = tell
        for item in items:
            try:
                envelope = envelope_of(item)
            except Exception as error:
                tell(self.consumer_id, [item], [unreadable(error)])
                continue
            message = Delivered(envelope, item.entry.offset, self._settle)
            self._items[message] = item
            self._waiting.append(message)
        self._arrived.set()

    def give_back(self) -> list[Item]:
        """What nobody has looked at."""
        waiting = [self._items.pop(message) for message in self._waiting]
        self._waiting.clear()
        return waiting

    def end(self) -> None:
        """The engine stops: who reads is told that nothing more will come."""
        self._is_closed = True
        self._arrived.set()

    def _settle(self, message: Delivered, verdict: Verdict) -> None:
        if asyncio._get_running_loop() is not self._loop:
            raise InvalidState("A message is acknowledged in the event loop of its reader.")
        item = self._items.pop(message, None)
        if item is not None and self._tell is not None:
            self._tell(self.consumer_id, [item], [verdict])


def envelope_of(item: Item) -> Envelope[Any]:
    """The message, with the number of this delivery."""
    envelope = restored(item.blob, item.topic, item.message_type)
    return envelope.with_attempt(envelope.attempt + item.deliveries) if item.deliveries else envelope


def unreadable(error: Exception) -> Verdict:
    """The verdict on a message whose bytes make no envelope."""
    outcome = Outcome(
        "", DispatchStatus.INVALID_MESSAGE, error_code=ErrorCode.PAYLOAD_INVALID, error_type=type(error).__name__,
        error_message=f"it cannot be read: {describe_exception(error)}",
    )  # fmt: skip
    return Verdict(Ending.FAILED, outcome, is_final=True)


def _rejected(reason: str) -> Outcome:
    return Outcome("", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.HANDLER_EXCEPTION, error_message=reason)
