"""Correlation: requests that wait for their replies, found by their correlation ids.

Each request has a future in the event loop that asked, and a timer there: no task, and nothing that sweeps. A reply may
come from any thread; of two replies to one request, exactly one wins.
"""

import asyncio
import math
import threading
from functools import partial
from typing import NamedTuple
from uuid import UUID

from raydispatch.dispatch.outcome import Reply
from raydispatch.errors import (
    ChannelClosed,
    CorrelationError,
    DuplicateReply,
    InvalidParameter,
    LateReply,
    RequestTimeout,
    UnknownReply,
)

DEFAULT_REMEMBERED = 10_000


class Correlations:
    """The requests under way. `open` needs a running event loop; everything else may be called from any thread.

    Example: `reply = await correlations.open(envelope.correlation_id, timeout_seconds=5)`.
    """

    def __init__(self, remembered: int = DEFAULT_REMEMBERED) -> None:
        # Reentrant: a finalizer may send a reply at any moment, in a thread that holds the lock.
        self._lock = threading.RLock()
        self._closed = False
        # By the ids' integers: these hash and compare without running Python code.
        self._pending: dict[int, _Request] = {}
        self._ended = _Endings(remembered)
        self._loops: frozenset[asyncio.AbstractEventLoop] = frozenset()

    def open(self, correlation_id: UUID, timeout_seconds: float) -> asyncio.Future[Reply]:
        """Ask: the future gets the reply, `RequestTimeout` or `ChannelClosed`. Cancelling it gives the request up."""
        if not 0 < timeout_seconds < math.inf:
            raise InvalidParameter(f"timeout_seconds must be positive and finite, not {timeout_seconds!r}.")
        loop = asyncio.get_running_loop()
        request = _Request(correlation_id, loop.create_future())
        with self._lock:
            if self._closed:
                raise ChannelClosed(correlation_id)
            if loop not in self._loops:
                self._meet(loop)
            if self.is_open(correlation_id):
                raise InvalidParameter(f"The request {correlation_id} is still open: each needs an id of its own.")
            self._pending[correlation_id.int] = request
        timer = loop.call_later(timeout_seconds, self._time_out, request)
        request.future.add_done_callback(partial(self._done, request, timer))
        return request.future

    def resolve(self, correlation_id: UUID, reply: Reply) -> None:
        """Answer a request; a `CorrelationError` says why that cannot be done."""
        with self._lock:
            if self._closed:
                raise ChannelClosed(correlation_id)
            request = self._pending.get(correlation_id.int)
            if request is None:
                raise (self._ended.get(correlation_id.int) or UnknownReply)(correlation_id)
            # Ended before the future knows: whoever comes next, a second reply or the timer, is too late.
            self._end(request, DuplicateReply)
        if request.is_over() or not request.settle(reply):
            with self._lock:
                self._ended.keep(correlation_id.int, LateReply)
            raise LateReply(correlation_id)

    def is_open(self, correlation_id: UUID) -> bool:
        """Whether a request waits for this reply."""
        request = self._pending.get(correlation_id.int)
        return request is not None and not request.is_over()

    def knows(self, correlation_id: UUID) -> bool:
        """Whether there is such a request, or was one lately: a reply to it is not `UnknownReply`."""
        key = correlation_id.int
        with self._lock:
            return key in self._pending or self._ended.get(key) is not None

    def close(self) -> None:
        """Tell all who wait that there will be no reply, and refuse new requests."""
        with self._lock:
            self._closed = True
            waiting = list(self._pending.values())
            for request in waiting:
                self._end(request, LateReply)
        for request in waiting:
            request.settle(ChannelClosed(request.correlation_id))

    def reopen(self) -> None:
        """Take requests again."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def _time_out(self, request: "_Request") -> None:
        if self._end(request, LateReply):
            request.settle(RequestTimeout(request.correlation_id))

    def _done(self, request: "_Request", timer: asyncio.TimerHandle, _: asyncio.Future[Reply]) -> None:
        timer.cancel()
        # Still pending only if the asker gave it up.
        self._end(request, LateReply)

    def _end(self, request: "_Request", further: type[CorrelationError]) -> bool:
        """Take a request from the pending, and keep what a further reply is answered with; False if it has ended."""
        key = request.correlation_id.int
        with self._lock:
            # The id may have been used again since.
            if self._pending.get(key) is not request:
                return False
            del self._pending[key]
            self._ended.keep(key, further)
            return True

    def _meet(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before a new event loop's first request, forget those of closed loops: their timers will never run."""
        gone = {known for known in self._loops if known.is_closed()}
        for request in list(self._pending.values()) if gone else ():
            if request.future.get_loop() in gone:
                self._end(request, LateReply)
        self._loops = self._loops - gone | {loop}


class _Request(NamedTuple):
    correlation_id: UUID
    future: asyncio.Future[Reply]

    def is_over(self) -> bool:
        """Whether nobody waits any more: given up a moment ago, or the event loop is closed."""
        return self.future.done() or self.future.get_loop().is_closed()

    def settle(self, answer: Reply | CorrelationError) -> bool:
        """Complete the future in its own event loop; False if that is closed."""
        loop = self.future.get_loop()
        if loop is _running_loop():
            _complete(self.future, answer)
            return True
        try:
            loop.call_soon_threadsafe(_complete, self.future, answer)
        except RuntimeError:
            return False
        return True


class _Endings:
    """How the last requests ended: for each id, the error that a further reply gets.

    Two generations: when the new one is half of the limit, the old one is let go. Nothing is evicted one by one.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._recent: dict[int, type[CorrelationError]] = {}
        self._older: dict[int, type[CorrelationError]] = {}

    def keep(self, key: int, further: type[CorrelationError]) -> None:
        if len(self._recent) >= self._half:
            self._older, self._recent = self._recent, {}
        self._recent[key] = further

    def get(self, key: int) -> type[CorrelationError] | None:
        return self._recent.get(key) or self._older.get(key)

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _complete(future: asyncio.Future[Reply], answer: Reply | CorrelationError) -> None:
    if future.done():
        return
    if isinstance(answer, CorrelationError):
        future.set_exception(answer)
        # Looked at once, so that asyncio does not complain of it where nobody awaits.
        future.exception()
    else:
        future.set_result(answer)
