"""A tally: a number that tests can wait for."""

import asyncio
import threading
from concurrent.futures import Future


class Tally:
    """Counts in any thread, and wakes those who wait for a count in whichever event loop they are."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Future[None]]] = []

    @property
    def count(self) -> int:
        """The number now."""
        return self._count

    def add(self, more: int = 1) -> int:
        """Count up, or down; the new number."""
        with self._lock:
            self._count += more
            reached = [one for one in self._waiting if one[0] <= self._count]
            self._waiting = [one for one in self._waiting if one[0] > self._count]
            count = self._count
        for _, future in reached:
            future.set_result(None)
        return count

    async def wait_for(self, count: int, limit_seconds: float, what: str) -> None:
        """Wait until there are so many, in real time; a `TimeoutError` says how many there were."""
        with self._lock:
            if self._count >= count:
                return
            reached: Future[None] = Future()
            # From now on it cannot be cancelled: `add` may be about to complete it.
            reached.set_running_or_notify_cancel()
            waiting = (count, reached)
            self._waiting.append(waiting)
        try:
            await asyncio.wait_for(asyncio.wrap_future(reached), limit_seconds)
        except TimeoutError:
            raise TimeoutError(f"{self._count} of {count} {what} after {limit_seconds:g} s.") from None
        finally:
            with self._lock:
                self._waiting = [one for one in self._waiting if one is not waiting]

    def __reduce__(self) -> tuple[object, ...]:
        # Locks do not pickle, and nobody waits in another process.
        return Tally, (self._count,)
