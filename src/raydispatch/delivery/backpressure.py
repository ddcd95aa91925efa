"""Backpressure: a queue that is bounded, and what happens to a message for which there is no room.

The strategy says who pays for a full queue: the sender by waiting (WAIT) or by a refusal (REJECT_NEW), the oldest
message (DROP_OLDEST), or all senders a little, before it is full (ADAPTIVE_RATE_LIMIT).
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from raydispatch.errors import InvalidState
from raydispatch.settings import BackpressureSettings, BackpressureStrategy

T = TypeVar("T")
NewsT = TypeVar("NewsT")

_LIFT_MARGIN = 1.25
"""A limit goes away a quarter above the rate that made it necessary: that rate alone was too much a moment ago."""
_log = logging.getLogger("raydispatch")


class Verdict(StrEnum):
    """What a queue says to a message."""

    ACCEPTED = "accepted"
    QUEUE_FULL = "queue_full"
    RATE_LIMITED = "rate_limited"
    CLOSED = "closed"


# In Python 3.11 reading a member from its class takes longer than appending to a deque.
_ACCEPTED = Verdict.ACCEPTED


class QueueCounts(NamedTuple):
    """What became of all that was offered: accepted + rejected + rate_limited.

    A `put` that is cancelled while it waits has offered nothing.
    """

    accepted: int
    """Those that came in: taken + dropped + still inside."""
    taken: int
    rejected: int
    """Refused because the queue was full or closed."""
    rate_limited: int
    dropped: int
    """Those that went for a newer one."""


class BoundedQueue(Generic[T]):
    """A queue of limited length. It belongs to one event loop: call it from there only, its sync methods too.

    Example: `queue = BoundedQueue[str](BackpressureSettings(capacity=100)); queue.offer("hello")`.
    """

    def __init__(
        self,
        settings: BackpressureSettings,
        *,
        now: Callable[[], float] = time.monotonic,
        on_drop: Callable[[T], None] | None = None,
        on_pressure: Callable[[bool], None] | None = None,
    ) -> None:
        self.settings = settings
        self.capacity = settings.capacity
        self._on_drop = on_drop
        self._on_pressure = on_pressure
        self._waits = settings.strategy is BackpressureStrategy.WAIT
        self._drops = settings.strategy is BackpressureStrategy.DROP_OLDEST
        is_adaptive = settings.strategy is BackpressureStrategy.ADAPTIVE_RATE_LIMIT
        self._rate = AdaptiveRate(settings, now) if is_adaptive else None
        self._high_length, self._low_length = _marks(settings)
        self._items: deque[T] = deque()
        self._is_high = False
        self._is_closed = False
        # Those who wait for room stand in line; those called have a place kept for them, which they take when they run.
        # An item enters with its sender and not before, so that a sender cancelled in between leaves nothing behind.
        self._line: OrderedDict[asyncio.Future[bool], None] = OrderedDict()
        self._called = 0
        self._is_awaited = False
        self._is_hurried = False
        self._taker: asyncio.Future[None] | None = None
        self._taker_wants: float = math.inf
        # How many came in is not counted, which keeps `offer` short: they are inside, or taken, or dropped.
        self._taken = self._rejected = self._rate_limited = self._dropped = 0
        self._calm_below = 0
        self._find_calm()

    def offer(self, item: T) -> Verdict:
        """Bring in an item, or be refused; at once."""
        items = self._items
        if len(items) >= self._calm_below:
            return self._decide(item)
        items.append(item)
        if len(items) >= self._taker_wants:
            self._wake_taker()
        return _ACCEPTED

    async def put(self, item: T) -> Verdict:
        """Like `offer`, but under WAIT the sender waits for room, first come first served.

        A sender that is cancelled meanwhile has not brought in its item, and the next one gets its place.
        """
        if self._waits and len(self._items) >= self._calm_below and self._must_stand_in_line():
            return await self._stand_in_line(item)
        return self.offer(item)

    def offer_all(self, items: Sequence[T]) -> bool:
        """Bring in all of them or none, whatever the strategy: nothing is dropped for them, and no rate limits them."""
        if not items:
            return True
        if self._is_closed or self._is_full(len(items)):
            self._rejected += len(items)
            return False
        self._items.extend(items)
        self._has_grown()
        return True

    def take(self, limit: int) -> list[T]:
        """The oldest items, as many as there are up to the limit; at once. Those in line come in instead."""
        items = self._items
        if limit >= len(items):
            taken = list(items)
            items.clear()
        else:
            taken = [items.popleft() for _ in range(limit)]
        self._taken += len(taken)
        if self._line:
            self._call_from_line()
        if self._is_high and len(items) <= self._low_length:
            self._change_pressure(False)
        return taken

    async def wait_for(self, count: int, linger_seconds: float) -> None:
        """Return when there are `count` items, or the queue is full, or `linger_seconds` after the first was seen.

        `hurry` and `close` end it earlier. Nothing is taken. Raises `InvalidState` if somebody waits already.
        """
        if self._is_awaited:
            raise InvalidState("Somebody waits for the items of this queue already: it has one taker at a time.")
        # A full queue gets no fuller, so that to wait for more would only keep its senders waiting.
        count = min(count, self.capacity)
        self._is_awaited = True
        self._is_hurried = self._is_closed
        try:
            while not (self._items or self._is_hurried):
                await self._reaches(1, None)
            if not self._is_hurried and len(self._items) < count and linger_seconds > 0:
                await self._reaches(count, linger_seconds)
        finally:
            self._is_awaited = False

    def hurry(self) -> None:
        """Whoever lingers for more items now makes do with those that are there."""
        if self._items:
            self._is_hurried = True
            self._wake_taker()

    def close(self) -> None:
        """Let nobody in any more, those in line included. Items that are inside stay, and can be taken."""
        self._is_closed = self._is_hurried = True
        for turn in self._line:
            if not turn.done():
                turn.set_result(False)
        self._line.clear()
        self._find_calm()
        self._wake_taker()

    def reopen(self) -> None:
        """Let items in again."""
        self._is_closed = False
        self._find_calm()

    @property
    def is_high(self) -> bool:
        """Whether the queue has reached its high mark, and not yet fallen to its low mark since."""
        return self._is_high

    @property
    def rate(self) -> float | None:
        """The limit that ADAPTIVE_RATE_LIMIT sets at present, in messages/s; None if there is none."""
        return self._rate.rate if self._rate is not None else None

    @property
    def counts(self) -> QueueCounts:
        """What became of all that was offered until now."""
        accepted = self._taken + self._dropped + len(self._items)
        return QueueCounts(accepted, self._taken, self._rejected, self._rate_limited, self._dropped)

    def __len__(self) -> int:
        return len(self._items)

    # Coming in

    def _decide(self, item: T) -> Verdict:
        if self._is_closed:
            return self._reject(Verdict.CLOSED)
        if self._is_full():
            if self._drops:
                return self._replace_oldest(item)
            if self._rate is not None:
                self._rate.adjust(self._is_high)
            return self._reject(Verdict.QUEUE_FULL)
        if self._rate is not None and not self._rate.admits(self._is_high):
            self._rate_limited += 1
            return Verdict.RATE_LIMITED
        self._items.append(item)
        self._has_grown()
        return _ACCEPTED

    def _is_full(self, newcomers: int = 1) -> bool:
        # While anybody called has not run yet, a newcomer would overtake. (A line without one stands at a full queue.)
        return len(self._items) + newcomers > self.capacity or self._called > 0

    def _reject(self, verdict: Verdict) -> Verdict:
        self._rejected += 1
        return verdict

    def _replace_oldest(self, item: T) -> Verdict:
        oldest = self._items.popleft()
        self._items.append(item)
        self._dropped += 1
        # Last, here and elsewhere: a callback finds a queue that it may use.
        _tell(self._on_drop, oldest)
        return _ACCEPTED

    def _has_grown(self) -> None:
        if len(self._items) >= self._taker_wants:
            self._wake_taker()
        if not self._is_high and len(self._items) >= self._high_length:
            self._change_pressure(True)

    def _change_pressure(self, is_high: bool) -> None:
        self._is_high = is_high
        self._find_calm()
        _tell(self._on_pressure, is_high)

    def _find_calm(self) -> None:
        """Below this length an item just comes in: one comparison in `offer` stands for all that could matter."""
        if self._is_closed or self._called or self._rate is not None:
            self._calm_below = 0
        else:
            self._calm_below = self.capacity if self._is_high else self._high_length - 1

    # Standing in line

    def _must_stand_in_line(self) -> bool:
        return not self._is_closed and self._is_full()

    async def _stand_in_line(self, item: T) -> Verdict:
        # Not called at once even if there is room by now: those called before have yet to run, and then call on.
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line[turn] = None
        try:
            was_called = await turn
        except BaseException:
            self._line.pop(turn, None)
            if turn.done() and not turn.cancelled() and turn.result():
                self._called -= 1
            self._call_from_line()
            raise
        if was_called:
            self._called -= 1
        if self._is_closed or not was_called:
            self._find_calm()
            return self._reject(Verdict.CLOSED)
        self._items.append(item)
        self._call_from_line()
        self._has_grown()
        return _ACCEPTED

    def _call_from_line(self) -> None:
        while self._line and len(self._items) + self._called < self.capacity:
            turn, _ = self._line.popitem(last=False)
            # Cancelled, though its task has not run yet to leave the line itself.
            if not turn.done():
                turn.set_result(True)
                self._called += 1
        self._find_calm()

    # Waking the taker

    async def _reaches(self, length: int, limit_seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._taker = loop.create_future()
        self._taker_wants = length
        timer = None if limit_seconds is None else loop.call_later(limit_seconds, self._wake_taker)
        try:
            await self._taker
        finally:
            self._taker = None
            if timer is not None:
                timer.cancel()

    def _wake_taker(self) -> None:
        self._taker_wants = math.inf
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


class AdaptiveRate:
    """How many may come in each second: halved, say, while the queue is high, and a little more again when it is not.

    There is no limit at first. Nothing runs in between: what time has changed is worked out at the next offer.

    Example: `AdaptiveRate(BackpressureSettings(rate_factor=0.5, rate_step=100), time.monotonic)`.
    """

    def __init__(self, settings: BackpressureSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._interval = settings.adjust_seconds
        self._now = now
        self._rate: float | None = None
        self._lift_above = 0.0
        self._admitted = 0
        self._tokens = 0.0
        self._refilled_at = self._adjusted_at = now()

    @property
    def rate(self) -> float | None:
        """The limit in messages/s as of the last offer; None if there is none."""
        return self._rate

    def admits(self, is_high: bool) -> bool:
        """Whether one more may come in now; if so, it counts."""
        self.adjust(is_high)
        if self._rate is not None:
            if self._tokens < 1:
                return False
            self._tokens -= 1
        self._admitted += 1
        return True

    def adjust(self, is_high: bool) -> None:
        """Bring the limit up to date; the pressure now stands for that since the last offer."""
        now = self._now()
        if self._rate is not None:
            self._refill(self._rate, now)
        if now - self._adjusted_at >= self._interval:
            intervals = int((now - self._adjusted_at) / self._interval)
            # By whole intervals and not to `now`, or offers that come seldom would make the changes seldom too.
            self._adjusted_at += intervals * self._interval
            self._change(is_high, intervals, now)
            self._admitted = 0

    def _refill(self, rate: float, now: float) -> None:
        burst = max(1.0, rate * self._interval)
        self._tokens = min(burst, self._tokens + rate * (now - self._refilled_at))
        self._refilled_at = now

    def _change(self, is_high: bool, intervals: int, now: float) -> None:
        if is_high and self._rate is None:
            self._impose(self._admitted / (intervals * self._interval), now)
        elif is_high and self._rate is not None:
            self._rate = max(self._settings.least_rate, self._rate * self._settings.rate_factor**intervals)
        elif self._rate is not None:
            self._rate += self._settings.rate_step * intervals
            if self._rate > self._lift_above:
                self._rate = None

    def _impose(self, measured: float, now: float) -> None:
        self._rate = max(self._settings.least_rate, measured * self._settings.rate_factor)
        self._lift_above = measured * _LIFT_MARGIN
        # Empty: those who made the queue high have had their share.
        self._tokens = 0.0
        self._refilled_at = now


def _marks(settings: BackpressureSettings) -> tuple[int, int]:
    """The lengths at which pressure begins and ends."""
    # Rounded first, since 0.7 * 10 is a little more than 7 and 0.29 * 100 a little less than 29.
    high = math.ceil(round(settings.high_mark * settings.capacity, 6))
    return high, math.floor(round(settings.low_mark * settings.capacity, 6))


def _tell(listener: Callable[[NewsT], None] | None, news: NewsT) -> None:
    if listener is None:
        return
    try:
        listener(news)
    except Exception as error:
        # The queue goes on. Only the type: the words of an exception may hold what nobody should read in a log.
        _log.error("queue callback failed", extra={"error_type": type(error).__name__})
