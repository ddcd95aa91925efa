"""A clock that stands still until the test moves it."""

import asyncio
import heapq
import math
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from raydispatch.errors import InvalidParameter
from raydispatch.testing.tally import Tally

T = TypeVar("T")

# Sums of floats that are equal on paper: ten times 0.1 s wake one who sleeps for 1 s.
_CLOSE_SECONDS = 1e-9
# A woken task needs a few turns of the loop to get to its next sleep: one for each future and task on its way.
_TURNS = 50
# What a handler in a thread gets of real time before `run` moves the clock on.
_GRACE_SECONDS = 0.001


class FakeClock:
    """Stands in for the real clock of an engine or a breaker. Safe in threads and in several event loops.

    What it cannot move is the event loop's own time: time limits of handlers and deadlines of requests stay real.

    Example: `result = await clock.run(engine.dispatch(topic, envelope))` skips the pauses between tries.
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = start_seconds
        self._lock = threading.Lock()
        self._numbers = count()
        self._sleepers: list[tuple[float, int, Future[None]]] = []
        """A heap: the earliest first; of equals, the one who came first."""
        self._asleep = Tally()

    def now(self) -> float:
        """Seconds since the test began, as far as anybody can tell."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until somebody moves the clock that far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper = self._lie_down(seconds)
        try:
            await asyncio.wrap_future(sleeper[2])
        finally:
            self._get_up(sleeper)

    @property
    def sleeping(self) -> int:
        """How many sleep now; a started engine's health check is one of them."""
        return self._asleep.count

    def tick(self, seconds: float) -> None:
        """Move on, without waiting for anybody: for breakers and other code that only asks for the time."""
        until = self._now + _checked(seconds)
        while self._wake_next(until):
            pass
        self._move_to(until)

    async def advance(self, seconds: float) -> None:
        """Move on from sleeper to sleeper: each one runs, at its own time, until it waits for something again.

        One who goes to sleep meanwhile is woken too if its time comes. Handlers in threads are not waited for: see
        `run`, and `wait_for_sleepers`.
        """
        until = self._now + _checked(seconds)
        await _take_turns()
        while self._wake_next(until):
            await _take_turns()
        self._move_to(until)

    async def run(self, work: Awaitable[T], limit_seconds: float = 5) -> T:
        """Wait for something, and move on to the next sleeper's time whenever nothing else is left to do.

        A handler that takes long in a thread may find that time has passed meanwhile.
        """
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(limit_seconds):
                while not await _ends_soon(task):
                    self._wake_next(math.inf)
        except TimeoutError:
            raise TimeoutError(
                f"Not done after {limit_seconds:g} s; it is {self._now:g} s by the fake clock."
            ) from None
        finally:
            task.cancel()
        return task.result()

    async def wait_for_sleepers(self, number: int, limit_seconds: float = 5) -> None:
        """Wait until at least so many sleep."""
        await self._asleep.wait_for(number, limit_seconds, "sleepers")

    def _lie_down(self, seconds: float) -> tuple[float, int, "Future[None]"]:
        woken: Future[None] = Future()
        # From now on it cannot be cancelled: somebody may be about to complete it.
        woken.set_running_or_notify_cancel()
        with self._lock:
            sleeper = (self._now + seconds, next(self._numbers), woken)
            heapq.heappush(self._sleepers, sleeper)
            self._asleep.add()
        return sleeper

    def _get_up(self, sleeper: tuple[float, int, "Future[None]"]) -> None:
        """Forget one who was cancelled; who was woken is gone already."""
        with self._lock:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
                heapq.heapify(self._sleepers)
                self._asleep.add(-1)

    def _wake_next(self, until: float) -> bool:
        """Move to the time of the next sleeper and wake it, if it comes before this time."""
        with self._lock:
            if not self._sleepers or self._sleepers[0][0] > until + _CLOSE_SECONDS:
                return False
            deadline, _, woken = heapq.heappop(self._sleepers)
            self._asleep.add(-1)
            self._now = max(self._now, deadline)
        woken.set_result(None)
        return True

    def _move_to(self, until: float) -> None:
        with self._lock:
            self._now = max(self._now, until)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise InvalidParameter(f"Time goes on by 0 seconds or more; not by {seconds!r}.")
    return seconds


async def _take_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _ends_soon(task: "asyncio.Future[T]") -> bool:
    await _take_turns()
    if not task.done():
        await asyncio.wait((task,), timeout=_GRACE_SECONDS)
    return task.done()
