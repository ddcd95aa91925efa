"""The token bucket: so many a second, and a burst of so many at once."""

import asyncio
import heapq
import math
import threading
from collections.abc import Awaitable, Callable

from raydispatch.dispatch.clock import SystemClock
from raydispatch.errors import InvalidParameter

# Sums of floats that are equal on paper; far below any clock's tick.
_TOLERANCE = 1e-9


class TokenBucket:
    """Lets at most `burst + per_second * t` through in any `t` seconds. Safe in threads.

    It keeps no tokens, but the time when the bucket would be full again: one number says the same, and needs no timer.

    Example: `if not bucket.take(): refuse()`, or `await bucket.turn()`.
    """

    def __init__(self, per_second: float, burst: int | None = None, now: Callable[[], float] = SystemClock.now) -> None:
        if not 0 < per_second < math.inf:
            raise InvalidParameter(f"per_second must be a number above 0, not {per_second}.")
        if burst is not None and burst < 1:
            raise InvalidParameter(f"burst must be at least 1, not {burst}.")
        self.per_second = per_second
        self.burst = max(1, int(per_second)) if burst is None else burst
        """How many may come at once; one second's worth if not given."""
        self._now = now
        self._interval = 1.0 / per_second
        self._head_start = (self.burst - 1) * self._interval
        self._full_at = -math.inf
        self._returned: list[float] = []
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more may pass now."""
        with self._lock:
            now = self._now()
            full_at = max(self._full_at, now)
            if full_at - now > self._head_start + _TOLERANCE:
                return False
            self._full_at = full_at + self._interval
            return True

    async def turn(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Wait until one more may pass: first come, first served."""
        now = self._now()
        moment = self._reserve(now)
        if moment - now <= _TOLERANCE:
            return
        try:
            await sleep(moment - now)
        except BaseException:
            # Else those who give up would keep their turns, and under load everyone would wait for nobody.
            with self._lock:
                heapq.heappush(self._returned, moment)
            raise

    def _reserve(self, now: float) -> float:
        """The first moment that nobody else has."""
        with self._lock:
            while self._returned:
                moment = heapq.heappop(self._returned)
                if moment >= now:
                    return moment
            full_at = max(self._full_at, now)
            self._full_at = full_at + self._interval
            return full_at - self._head_start

    def __reduce__(self) -> tuple[object, ...]:
        # Another process has another clock, so that the bucket arrives there full.
        return type(self), (self.per_second, self.burst, self._now)
