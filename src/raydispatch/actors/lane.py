"""A lane: messages of one event loop, gathered into calls."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias

from raydispatch.actors.wire import Message
from raydispatch.dispatch.outcome import DispatchResult
from raydispatch.settings import SystemSettings

MAX_PARCEL_BYTES = 16_000_000
"""Of one call; a single larger message still goes, alone."""

FEW_CALLS = 3
"""With so many under way, another one waits until it is full: fewer and larger ones cost less."""
SMALL_BATCH = 100
"""Messages that it is not worth to share out over several calls."""


class Pending(asyncio.Future[DispatchResult]):
    """The result of a message that is on its way.

    A future, so that many can be gathered without a task for each, which would be a third of a message's time here;
    and a coroutine as well, since `create_task` and `TaskGroup` take nothing else.
    """

    _steps: Generator[Any, Any, DispatchResult] | None = None

    def send(self, value: Any) -> Any:
        """A step of the task that it was made into."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """An exception from that task."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """That task is given up."""
        if self._steps is not None:
            self._steps.close()


Entry: TypeAlias = tuple[Message, Pending]
SendBatch: TypeAlias = Callable[[Sequence[Message]], Awaitable[list[DispatchResult]]]


class Lane:
    """Messages of one event loop on their way.

    What arrives in one turn of the loop goes in one call; a lone message goes at once, for nobody waits for a timer.
    While several calls are under way, messages gather, and go when there are enough for a call, or one comes back.
    """

    def __init__(self, settings: SystemSettings, send_batch: SendBatch) -> None:
        self._settings = settings
        self._send_batch = send_batch
        self._waiting: deque[Entry] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._loop = asyncio.get_running_loop()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and nothing is under way."""
        return not self._waiting and not self._calls

    async def changed(self) -> None:
        """Wait until a call has come back."""
        if self._calls:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(0)

    def send(self, message: Message) -> Pending:
        """Send a message with the next call. What waits is bounded by those who wait for it."""
        future = Pending(loop=self._loop)
        self._waiting.append((message, future))
        if len(self._waiting) >= self._settings.batch_messages and len(self._calls) < self._settings.window_calls:
            self._flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_scheduled)
        return future

    def _flush_scheduled(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        while self._waiting and (free := self._most_calls - len(self._calls)) > 0:
            if batch := self._take(self._size(free)):
                try:
                    # On its way already when this returns, though the event loop may be busy for long.
                    sent = self._send_batch([message for message, _ in batch])
                except Exception as error:
                    _fail(batch, error)
                    continue
                call = self._loop.create_task(_answer(batch, sent))
                self._calls.add(call)
                call.add_done_callback(self._returned)

    @property
    def _most_calls(self) -> int:
        full = len(self._waiting) >= self._settings.batch_messages
        return self._settings.window_calls if full else min(FEW_CALLS, self._settings.window_calls)

    def _size(self, free: int) -> int:
        """Of the next call: what waits is shared out, so that one part travels while another is worked on."""
        return min(max(-(-len(self._waiting) // free), SMALL_BATCH), self._settings.batch_messages)

    def _take(self, most: int) -> list[Entry]:
        batch: list[Entry] = []
        waiting = self._waiting
        size = 0
        while waiting and len(batch) < most:
            entry = waiting.popleft()
            # Nobody waits for a cancelled one any more, and nothing has been sent: it need not be.
            if entry[1].done():
                continue
            size += len(entry[0][2])
            if batch and size > MAX_PARCEL_BYTES:
                waiting.appendleft(entry)
                break
            batch.append(entry)
        return batch

    def _returned(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # It has gone to those who wait.
        self._flush()


async def _answer(batch: list[Entry], sent: Awaitable[list[DispatchResult]]) -> None:
    try:
        results = await sent
    except BaseException as error:
        _fail(batch, error)
        raise
    for (_, future), result in zip(batch, results, strict=True):
        if not future.done():
            future.set_result(result)


def _fail(batch: list[Entry], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
