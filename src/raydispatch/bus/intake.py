"""Intake: messages that nobody waits for stand in a bounded queue until a loop takes them, in batches."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any, TypeAlias

from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.messages.envelope import Envelope

Message: TypeAlias = tuple[str, Envelope[Any]]
Deliver: TypeAlias = Callable[[str, Envelope[Any]], Awaitable[Any]]
Tell: TypeAlias = Callable[[Any], None]
"""Gets what `Deliver` has brought back."""
Abandon: TypeAlias = Callable[[str, Envelope[Any]], None]

CLEAN_UP_SECONDS = 5.0
"""How long a handler that was cancelled may take to end."""

delivering: ContextVar[bool] = ContextVar("raydispatch_delivering", default=False)
"""Whether this is part of a delivery: then it holds one of the places that make room in the queue."""


class Intake:
    """One queue and its loop, in one event loop.

    A batch is taken when it is full or has waited long enough, and grouped by message type. Its messages start in that
    order and run side by side, as many as allowed: a slow one holds up nobody. When too many run, the queue fills, and
    its strategy decides. Every message that was accepted ends once: `tell` gets its result, or it is abandoned.
    """

    def __init__(
        self,
        queue: BoundedQueue[Message],
        deliver: Deliver,
        abandon: Abandon,
        *,
        batch_size: int,
        wait_seconds: float,
        concurrency: int,
        tell: Tell | None = None,
        clean_up_seconds: float = CLEAN_UP_SECONDS,
    ) -> None:
        self.queue = queue
        self._deliver = deliver
        self._tell = tell
        self._abandon = abandon
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._concurrency = concurrency
        self._clean_up_seconds = clean_up_seconds
        self._ready: deque[Message] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[Any] | None, Message] = {}
        """What each worker delivers now; whoever takes a message out of here has the last word on it."""
        self._spare = False
        """Whether a worker was made that has not begun yet."""
        self._drainers = 0
        self._idle = asyncio.Event()
        self._taken = asyncio.Event()
        # In a context of its own: handlers must not see the variables of whoever happened to publish first.
        self._loop = asyncio.get_running_loop().create_task(self._run(), name="raydispatch intake", context=Context())
        self._loop.add_done_callback(self._loop_ended)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queue and not self._ready and not self._workers

    async def drained(self) -> None:
        """Wait until everything accepted so far, and what comes meanwhile, is done."""
        self._drainers += 1
        try:
            while not self.is_idle:
                self.queue.hurry()
                self._idle.clear()
                await self._idle.wait()
        finally:
            self._drainers -= 1

    def cancel(self) -> None:
        """End at once; what is left is abandoned, message by message."""
        for task in (self._loop, *self._workers):
            task.cancel()

    async def ended(self) -> None:
        """After `cancel`, give the handlers time to clean up; one that takes no notice is left alone."""
        _, deaf = await asyncio.wait((self._loop, *self._workers), timeout=self._clean_up_seconds)
        for task in deaf:
            # Once more, for one that took the first time for a failure and tried again.
            task.cancel()
            self._abandon_running(task)

    def abandon_all(self) -> None:
        """For when the event loop was closed under it, and none of its tasks will ever run again."""
        for task in list(self._running):
            self._abandon_running(task)
        self._abandon_waiting()

    async def _run(self) -> None:
        while True:
            await self.queue.wait_for(1, 0)
            if not self._drainers:  # Asked only now: they may have come while there was nothing to hurry.
                await self.queue.wait_for(self._batch_size, self._wait_seconds)
            batch = self.queue.take(self._batch_size)
            if not batch:
                return  # Closed, and empty.
            self._ready.extend(_by_type(batch))
            self._add_worker()
            while self._ready:
                self._taken.clear()
                await self._taken.wait()

    def _loop_ended(self, _: asyncio.Task[None]) -> None:
        # The event loop is closing, or `cancel` was called: nothing that was accepted goes without a word, and nothing
        # more is accepted, since nobody would take it. (Not in a `finally` above: a task may end before it begins.)
        self.queue.close()
        self._abandon_waiting()
        if self.is_idle:
            self._idle.set()

    def _add_worker(self) -> None:
        if (
            self._ready
            and not self._spare
            and len(self._workers) < self._concurrency
            # At the end of an event loop all its tasks are cancelled; one that is made after that would be left behind.
            and not self._loop.cancelling()
        ):
            self._spare = True
            worker = asyncio.get_running_loop().create_task(self._work(), name="raydispatch delivery")
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    async def _work(self) -> None:
        # One task delivers many messages, and makes another one only if there is more to do than it can start: with
        # handlers that never wait, a single task does it all.
        self._spare = False
        delivering.set(True)
        worker = asyncio.current_task()
        while self._ready:
            self._running[worker] = message = self._ready.popleft()
            self._add_worker()
            if not self._ready:
                self._taken.set()
            try:
                result = await self._deliver(*message)
            except BaseException:
                self._abandon_running(worker)
                raise
            if self._running.pop(worker, None) is not None and self._tell is not None:
                self._tell(result)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not self._workers:
            self._spare = False
        self._add_worker()  # For what a worker left behind whose handler cancelled it.
        if self.is_idle:
            self._idle.set()

    def _abandon_running(self, worker: asyncio.Task[Any] | None) -> None:
        message = self._running.pop(worker, None)
        if message is not None:
            self._abandon(*message)

    def _abandon_waiting(self) -> None:
        waiting = [*self._ready, *self.queue.take(len(self.queue))]
        self._ready.clear()
        for topic, envelope in waiting:
            self._abandon(topic, envelope)


def _by_type(batch: Sequence[Message]) -> list[Message]:
    """In groups of one message type, each in the order of arrival; the first type to come is the first group."""
    groups: dict[str, list[Message]] = {}
    for message in batch:
        groups.setdefault(message[1].message_type, []).append(message)
    return [message for group in groups.values() for message in group]
