"""Ready-made middleware: timing, rate limit, deduplication, validation.

Each one serves any number of dispatchers, each for itself, and can be pickled: what it remembers stays behind.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from raydispatch.delivery.rate import TokenBucket
from raydispatch.dispatch.clock import SystemClock
from raydispatch.dispatch.handler import PayloadMisfit, payload_check
from raydispatch.dispatch.middleware import Next
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope

_log = logging.getLogger("raydispatch")


class Timing:
    """Tells how long a dispatcher took, retries and inner middleware included; to the log if to nobody else.

    Example: `Timing(lambda dispatcher_id, message_type, milliseconds, status: histogram.record(milliseconds))`.
    """

    def __init__(self, record: Callable[[str, str, float, DispatchStatus], None] | None = None) -> None:
        self._record = record or _log_timing

    async def __call__(self, envelope: Envelope[Any], next: Next) -> Outcome:  # noqa: A002
        """Pass on, and take the time."""
        started = perf_counter()
        outcome = await next(envelope)
        milliseconds = (perf_counter() - started) * 1000.0
        try:
            self._record(next.dispatcher_id, envelope.message_type, milliseconds, outcome.status)
        except Exception as error:
            # Who watches must not change what is watched.
            _log.error(
                "timing was not recorded",
                extra={
                    "dispatcher_id": next.dispatcher_id,
                    "correlation_id": str(envelope.correlation_id),
                    "error": describe_exception(error),
                },
            )
        return outcome


def _log_timing(dispatcher_id: str, message_type: str, milliseconds: float, status: DispatchStatus) -> None:
    _log.debug(
        "dispatcher timed",
        extra={
            "dispatcher_id": dispatcher_id,
            "message_type": message_type,
            "duration_ms": milliseconds,
            "status": status.value,
        },
    )


class RateLimit:
    """So many messages a second for each dispatcher; beyond that they are REJECTED, or with `wait` they wait.

    Example: `RateLimit(100, burst=20, wait=True)`.
    """

    def __init__(
        self,
        per_second: float,
        burst: int | None = None,
        *,
        wait: bool = False,
        now: Callable[[], float] = SystemClock.now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make_bucket = partial(TokenBucket, per_second, burst, now)
        self._make_bucket()  # So that mistakes in the numbers show here, and not with the first message.
        self._wait = wait
        self._sleep = sleep
        self._buckets: dict[str, TokenBucket] = {}

    async def __call__(self, envelope: Envelope[Any], next: Next) -> Outcome:  # noqa: A002
        """Pass on what the limit allows."""
        bucket = self._bucket(next.dispatcher_id)
        if self._wait:
            await bucket.turn(self._sleep)
        elif not bucket.take():
            return Outcome(
                next.dispatcher_id,
                DispatchStatus.REJECTED,
                error_code=ErrorCode.RATE_LIMITED,
                error_message=f"its rate limit of {bucket.per_second:g} messages a second is reached",
            )
        return await next(envelope)

    def _bucket(self, dispatcher_id: str) -> TokenBucket:
        bucket = self._buckets.get(dispatcher_id)
        if bucket is None:
            # `setdefault`, so that two threads agree on one.
            bucket = self._buckets.setdefault(dispatcher_id, self._make_bucket())
        return bucket


class Deduplication:
    """A message that a dispatcher has handled with SUCCESS, or is handling right now, is SKIPPED when it comes again.

    Of each dispatcher it remembers at most `capacity` message ids, and never fewer than the last half of that.

    Example: `Deduplication(capacity=1_000_000)`.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise InvalidParameter(f"capacity must be at least 1, not {capacity}.")
        self._capacity = capacity
        self._memories: dict[str, _Memory] = {}

    async def __call__(self, envelope: Envelope[Any], next: Next) -> Outcome:  # noqa: A002
        """Pass on what is new."""
        memory = self._memories.get(next.dispatcher_id)
        if memory is None:
            memory = self._memories.setdefault(next.dispatcher_id, _Memory(self._capacity))
        number = envelope.message_id.int
        if not memory.begin(number):
            return Outcome(
                next.dispatcher_id,
                DispatchStatus.SKIPPED,
                error_code=ErrorCode.DUPLICATE_MESSAGE,
                error_message="a message with this id was handled already, or is being handled",
            )
        succeeded = False
        try:
            outcome = await next(envelope)
            succeeded = outcome.status is DispatchStatus.SUCCESS
        finally:
            memory.end(number, succeeded)
        return outcome

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._capacity,)


class _Memory:
    """The message ids of one dispatcher, in two generations: when the young one is full, the old one goes as a whole.

    Taking out the oldest one by one, with `next(iter(...))`, gets slower with each that was taken out before.
    """

    def __init__(self, capacity: int) -> None:
        self._half = (capacity + 1) // 2
        self._running: set[int] = set()
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, number: int) -> bool:
        """Whether it is new; if so, it is running from now on."""
        with self._lock:
            if number in self._running or number in self._young or number in self._old:
                return False
            self._running.add(number)
            return True

    def end(self, number: int, succeeded: bool) -> None:
        with self._lock:
            self._running.discard(number)
            if succeeded:
                self._young.add(number)
                if len(self._young) >= self._half:
                    self._old, self._young = self._young, set()


class Validation:
    """Payloads of the named message types must fit a type: a pydantic model, or anything else that pydantic knows.

    A payload may come as a dict, as JSON, or as an instance; what goes on is an instance. Other types pass unseen.

    Example: `Validation({"OrderPlaced": OrderPlaced})`.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = dict(models)
        self._checks = {name: payload_check(model) for name, model in self._models.items()}

    async def __call__(self, envelope: Envelope[Any], next: Next) -> Outcome:  # noqa: A002
        """Pass on what fits."""
        check = self._checks.get(envelope.message_type)
        if check is not None:
            try:
                envelope = check(envelope)
            except PayloadMisfit as misfit:
                return Outcome(
                    next.dispatcher_id,
                    DispatchStatus.INVALID_MESSAGE,
                    error_code=ErrorCode.PAYLOAD_INVALID,
                    error_type="ValidationError",
                    error_message=str(misfit),
                )
        return await next(envelope)

    def __reduce__(self) -> tuple[object, ...]:
        # The models travel; pydantic's validators are built anew.
        return type(self), (self._models,)
