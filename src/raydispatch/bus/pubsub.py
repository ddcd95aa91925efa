"""Publish and subscribe: who listens to which topics, and the bounded queue of each one who does.

Messages may come from any thread; they are read in the event loop of the subscriber. One that is too slow misses the
newest messages and is told how many: it never holds up anybody else.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeAlias

from raydispatch.errors import InvalidParameter, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MAX_TOPIC_LENGTH, segments_of
from raydispatch.routing.index import PatternIndex
from raydispatch.routing.pattern import Pattern, parse_pattern

DEFAULT_CAPACITY = 1_000

OnMissed: TypeAlias = Callable[[int], None]
"""Called with the number of messages missed since the last time."""

_CACHED_TOPICS = 4_096
_FEW_EMPTY_LEAVES = 64

_log = logging.getLogger("raydispatch")


class Subscription:
    """One who listens: an async iterator of envelopes, for one reader at a time. Made by `subscribe`.

    Example: `async with engine.subscribe("dev.order.**") as orders:`, and in it `async for envelope in orders:`.
    """

    def __init__(
        self,
        pattern: str,
        capacity: int,
        leave: "Callable[[Subscription], None]",
        on_missed: OnMissed | None = None,
    ) -> None:
        self.pattern = pattern
        self.capacity = capacity
        """How many messages may wait to be read."""
        self.delivered = 0
        """Messages taken into the queue."""
        self.missed = 0
        """Messages not taken because the queue was full."""
        self._leave = leave
        self._on_missed = on_missed
        # Reentrant: a finalizer may publish or unsubscribe at any moment, in a thread that holds the lock.
        self._lock = threading.RLock()
        self._queue: deque[Envelope[Any]] = deque()
        self._ended = False
        self._reading = False
        self._sleeper: asyncio.Future[None] | None = None
        """What the reader waits for, while the queue is empty."""
        self._untold = 0
        self._in_gap = False

    @property
    def pending(self) -> int:
        """Messages that wait to be read."""
        return len(self._queue)

    def unsubscribe(self) -> None:
        """Take no more messages. Those in the queue can still be read; then the iterator ends."""
        with self._lock:
            self._ended = True
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            _wake(sleeper)
        self._leave(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.unsubscribe()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope[Any]:
        if self._reading:
            raise InvalidState(f"The subscription to '{self.pattern}' has a reader that waits: one at a time.")
        self._reading = True
        try:
            while not self._queue and not self._ended:
                await self._arrival()
            if self._untold:
                self._tell_missed()
            if not self._queue:
                raise StopAsyncIteration
            # Messages stay in the queue until this moment: a reader that is cancelled while it waits loses none.
            envelope = self._queue.popleft()
        finally:
            self._reading = False
        if not self._queue:
            self._in_gap = False
        return envelope

    async def _arrival(self) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._queue or self._ended:
                return
            self._sleeper = sleeper
        try:
            await sleeper
        finally:
            self._sleeper = None

    def _tell_missed(self) -> None:
        with self._lock:
            missed, self._untold = self._untold, 0
        if self._on_missed is not None:
            self._on_missed(missed)

    def _offer(self, envelope: Envelope[Any]) -> bool:
        """Take a message if there is room; from any thread."""
        sleeper = None
        with self._lock:
            if self._ended:
                return False
            taken = len(self._queue) < self.capacity
            if taken:
                self._queue.append(envelope)
                self.delivered += 1
                # The first message wakes the reader; those that come before it is up need not.
                sleeper, self._sleeper = self._sleeper, None
            else:
                self.missed += 1
                self._untold += 1
        if sleeper is not None:
            _wake(sleeper)
        if not taken and not self._in_gap:
            # Said where the gap begins, since a reader that is stuck never sees its end. It lasts until the reader has
            # caught up: one that is always too slow would otherwise be warned of with every other message.
            self._in_gap = True
            _log.warning("subscriber is too slow", extra={"pattern": self.pattern, "missed": self.missed})
        return taken


class Subscriptions:
    """All who listen. Every method may be called from any thread.

    Example: `subscriptions.deliver("dev.order.events", envelope)` gives the number of queues that took it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._members: dict[Subscription, _Leaf] = {}
        self._leaves: list[_Leaf] = []
        self._empty_leaves = 0
        self._index: PatternIndex[_Leaf] = PatternIndex()
        self._cache: dict[str, tuple[Subscription, ...]] = {}

    def subscribe(
        self, pattern: str, capacity: int = DEFAULT_CAPACITY, *, on_missed: OnMissed | None = None
    ) -> Subscription:
        """Listen to all topics that fit a pattern. After a gap, `on_missed` is called by the next read with the number
        of messages missed."""
        if not isinstance(pattern, str):
            raise InvalidParameter(f"subscribe takes a topic pattern, not {type(pattern).__name__}.")
        if type(capacity) is not int or capacity < 1:
            raise InvalidParameter(f"capacity must be a whole number of at least 1, not {capacity!r}.")
        parsed = parse_pattern(pattern)
        subscription = Subscription(pattern, capacity, self._remove, on_missed)
        with self._lock:
            if self._closed:
                raise InvalidState("Nobody can subscribe any more: the engine was stopped.")
            self._add(subscription, parsed)
        return subscription

    def deliver(self, topic: str, envelope: Envelope[Any]) -> int:
        """Offer a message to all whose pattern fits its topic; the number of queues that took it."""
        if not self._members:
            return 0
        fitting = self._fitting(topic)
        if not fitting:
            return 0
        if envelope.topic != topic:
            envelope = envelope.with_topic(topic)
        return sum([subscription._offer(envelope) for subscription in fitting])

    def would_deliver(self, topic: str) -> bool:
        """Whether someone's pattern fits a topic."""
        return bool(self._members and self._fitting(topic))

    def close(self) -> None:
        """End all subscriptions, and refuse new ones."""
        with self._lock:
            self._closed = True
            ending = list(self._members)
        for subscription in ending:
            subscription.unsubscribe()

    def reopen(self) -> None:
        """Take new subscriptions again."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._members)

    def _fitting(self, topic: str) -> tuple[Subscription, ...]:
        found = self._cache.get(topic)
        return self._look_up(topic) if found is None else found

    def _look_up(self, topic: str) -> tuple[Subscription, ...]:
        if len(topic) > MAX_TOPIC_LENGTH:
            # It fits nothing, and remembering topics of any size would be a way to fill the memory.
            return ()
        segments = segments_of(topic)
        # Locked to the end: an answer that is out of date must not get into a cache that was just emptied.
        with self._lock:
            leaves = self._index.find(segments) if segments else []
            found = tuple([subscription for leaf in leaves for subscription in leaf.subscriptions])
            if len(self._cache) >= _CACHED_TOPICS:
                self._cache = {}
            self._cache[topic] = found
        return found

    def _add(self, subscription: Subscription, pattern: Pattern) -> None:
        leaf = self._index.leaf(pattern, lambda: self._new_leaf(pattern))
        if not leaf.subscriptions:
            self._empty_leaves -= 1
        leaf.subscriptions[subscription] = None
        self._members[subscription] = leaf
        self._cache = {}

    def _new_leaf(self, pattern: Pattern) -> "_Leaf":
        leaf = _Leaf(pattern)
        self._leaves.append(leaf)
        self._empty_leaves += 1
        return leaf

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            leaf = self._members.pop(subscription, None)
            if leaf is None:
                return
            del leaf.subscriptions[subscription]
            self._cache = {}
            if not leaf.subscriptions:
                self._empty_leaves += 1
                if self._empty_leaves > max(_FEW_EMPTY_LEAVES, len(self._leaves) / 2):
                    self._rebuild()

    def _rebuild(self) -> None:
        """Leave out the empty leaves. They are the larger half, so each unsubscribe pays for no more than one other."""
        self._leaves = [leaf for leaf in self._leaves if leaf.subscriptions]
        self._empty_leaves = 0
        self._index = PatternIndex()
        for leaf in self._leaves:
            self._index.leaf(leaf.pattern, leaf.itself)


class _Leaf:
    """Those who subscribed to one pattern, in order."""

    __slots__ = ("pattern", "subscriptions")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        # A dict for its order and for leaving in constant time: thousands may share a pattern.
        self.subscriptions: dict[Subscription, None] = {}

    def itself(self) -> "_Leaf":
        return self


def _wake(sleeper: asyncio.Future[None]) -> None:
    """Let a reader go on, from whatever thread."""
    loop = sleeper.get_loop()
    if loop is _running_loop():
        _rouse(sleeper)
        return
    # A closed loop refuses; then nobody waits there any more.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_rouse, sleeper)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _rouse(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
