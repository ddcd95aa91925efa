"""The time limit of a dispatcher: one timer for all of its running calls.

`asyncio.timeout` arms and cancels a timer of the loop for each call. All calls of a dispatcher have the same limit, so
they expire in the order in which they began: a plain ordered dict, and one timer for its first entry, do the same.
"""

import asyncio
from itertools import takewhile
from types import TracebackType
from weakref import WeakKeyDictionary


class TimeLimitExpired(TimeoutError):
    """The time was up; unlike any other `TimeoutError`, which a handler may raise for reasons of its own."""


class TimeLimit:
    """A limit in seconds for every call made under it; serves any number of event loops.

    Example: `with limit.call(): await handler(envelope)` raises `TimeLimitExpired` when the time is up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Running] = WeakKeyDictionary()

    def call(self) -> "_Call":
        """A context for one call, which is cancelled when the time is up."""
        loop = asyncio.get_running_loop()
        running = self._by_loop.get(loop)
        if running is None:
            running = self._by_loop[loop] = _Running(self.seconds)
        return _Call(running, loop)


class _Running:
    """The calls under way in one loop, the earliest first, and whether the one timer runs.

    The timer itself is not kept: it refers to its loop, which could then never go from the weak dictionary.
    """

    __slots__ = ("armed", "calls", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: dict[_Call, None] = {}
        self.armed = False

    def expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for call in list(takewhile(lambda call: call.deadline <= now, self.calls)):
            call.expire()
        first = next(iter(self.calls), None)
        self.armed = first is not None
        if first is not None:
            loop.call_at(first.deadline, self.expire, loop)


class _Call:
    __slots__ = ("_cancels_before", "_expired", "_loop", "_running", "_task", "deadline")

    def __init__(self, running: _Running, loop: asyncio.AbstractEventLoop) -> None:
        self._running = running
        self._loop = loop
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # Coroutines of a loop run in tasks.
        self._task = task
        self._cancels_before = task.cancelling()
        self.deadline = self._loop.time() + self._running.seconds
        self._running.calls[self] = None
        if not self._running.armed:
            self._running.armed = True
            self._loop.call_at(self.deadline, self._running.expire, self._loop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._expired:
            del self._running.calls[self]
        elif self._task.uncancel() <= self._cancels_before and kind is asyncio.CancelledError:
            # Ours was the only cancellation: had the caller cancelled too, that one would go on.
            raise TimeLimitExpired from error

    def expire(self) -> None:
        self._expired = True
        del self._running.calls[self]
        self._task.cancel()
