"""Endpoints: the replicas of one dispatcher, which of them are well, and which one takes the next message.

In one process an endpoint's target is a handler, on Ray the handle of an actor; nothing here knows the difference.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Generic, NamedTuple, TypeVar

from raydispatch.dispatch.clock import SystemClock
from raydispatch.errors import DuplicateRegistration, NotRegistered

TargetT = TypeVar("TargetT")

_log = logging.getLogger("raydispatch")


class EndpointState(StrEnum):
    """Whether an endpoint gets messages."""

    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    """It failed, and gets none until it answers again."""
    LEAVING = "leaving"
    """It ends what it has begun, and is gone then."""


@dataclass(slots=True, eq=False)
class Endpoint(Generic[TargetT]):
    """One replica. Its `Endpoints` writes to it; everybody else only reads."""

    endpoint_id: str
    target: TargetT
    joined_at: float
    state: EndpointState = EndpointState.HEALTHY
    in_flight: int = 0
    failures: int = 0
    """Failed calls and checks since it was last well."""
    idle: "Future[None] | None" = field(default=None, repr=False)
    """Completed when the last call ends; there only while somebody cares."""


class EndpointInfo(NamedTuple):
    """What is told about an endpoint, as it was when asked."""

    endpoint_id: str
    dispatcher_id: str
    state: EndpointState
    in_flight: int
    failures: int


class Endpoints(Generic[TargetT]):
    """The endpoints of one dispatcher; they join and leave while messages flow. Safe in threads.

    Example: `endpoint = endpoints.pick()`, then `begun(endpoint)`, the call, and `ended(endpoint)`.
    """

    def __init__(
        self, dispatcher_id: str, *, now: Callable[[], float] = SystemClock.now, random: Random | None = None
    ) -> None:
        self.dispatcher_id = dispatcher_id
        self._now = now
        self._random = (random or Random()).random  # noqa: S311 - it spreads load, and guards nothing
        self._lock = threading.Lock()
        self._by_id: dict[str, Endpoint[TargetT]] = {}
        # Replaced, never changed: `pick` reads it once, without the lock, and sees one state of things.
        self._healthy: tuple[Endpoint[TargetT], ...] = ()

    def join(self, endpoint_id: str, target: TargetT) -> Endpoint[TargetT]:
        """Add an endpoint, which is healthy until it fails. The id of one that leaves is taken until it is gone."""
        endpoint = Endpoint(endpoint_id, target, self._now())
        with self._lock:
            if endpoint_id in self._by_id:
                raise DuplicateRegistration("endpoint", endpoint_id)
            self._by_id[endpoint_id] = endpoint
            self._sort_out()
        return endpoint

    def leave(self, endpoint_id: str) -> Endpoint[TargetT]:
        """Pick it no more, and forget it when its last call has ended, which `drained` waits for."""
        with self._lock:
            endpoint = self._by_id.get(endpoint_id)
            if endpoint is None:
                raise NotRegistered("endpoint", endpoint_id)
            endpoint.state = EndpointState.LEAVING
            self._sort_out()
            self._watch(endpoint)
        # Asked only after `idle` was set: either we see the last call end here, or `ended` sees that we wait.
        if endpoint.in_flight == 0:
            self._became_idle(endpoint)
        return endpoint

    async def drained(self, endpoint: Endpoint[TargetT]) -> None:
        """Wait until none of its calls is under way; their ends may be told by other threads and event loops."""
        with self._lock:
            idle = self._watch(endpoint)
        if endpoint.in_flight == 0:
            self._became_idle(endpoint)
        else:
            await asyncio.wrap_future(idle)

    def pick(self, excluding: Collection[str] = ()) -> Endpoint[TargetT] | None:
        """The endpoint for the next message: the less busy of two healthy ones, or None if there is none.

        The less busy of two is nearly as good as the least busy of all, which everybody would rush to at once.
        """
        healthy = self._healthy
        if len(healthy) == 1 and not excluding:
            return healthy[0]
        if excluding:
            healthy = tuple(endpoint for endpoint in healthy if endpoint.endpoint_id not in excluding)
        count = len(healthy)
        if count < 2:
            return healthy[0] if healthy else None
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        one, other = healthy[first], healthy[second + (second >= first)]
        return one if one.in_flight <= other.in_flight else other

    def begun(self, endpoint: Endpoint[TargetT], messages: int = 1) -> None:
        """A call to it begins; say so before anything is awaited after `pick`, or it may leave in between."""
        # No lock, for speed: CPython 3.11 and 3.12 switch threads at calls and at the end of loops, not inside a `+=`.
        endpoint.in_flight += messages

    def ended(self, endpoint: Endpoint[TargetT], messages: int = 1) -> None:
        """A call to it has ended, however."""
        endpoint.in_flight -= messages
        if endpoint.idle is not None and endpoint.in_flight == 0:
            self._became_idle(endpoint)

    def quarantine(self, endpoint_id: str) -> bool:
        """It failed: pick it no more until it is restored. Whether that is new; a late word on one that left is not."""
        with self._lock:
            endpoint = self._by_id.get(endpoint_id)
        return endpoint is not None and self._judge(endpoint, well=False)

    def restore(self, endpoint_id: str) -> bool:
        """It is well: pick it again. Whether that is new."""
        with self._lock:
            endpoint = self._by_id.get(endpoint_id)
        return endpoint is not None and self._judge(endpoint, well=True)

    async def check(self, ping: Callable[[TargetT], Awaitable[bool]], timeout_seconds: float) -> None:
        """Ask all at the same time: True restores; False, an exception or no answer in time quarantines."""
        asked = [endpoint for endpoint in self.all() if endpoint.state is not EndpointState.LEAVING]
        await asyncio.gather(*(self._ask(endpoint, ping, timeout_seconds) for endpoint in asked))

    def find(self) -> list[EndpointInfo]:
        """What there is to know about each, in the order of joining; one that leaves is listed until it is gone."""
        return [
            EndpointInfo(one.endpoint_id, self.dispatcher_id, one.state, one.in_flight, one.failures)
            for one in self.all()
        ]

    def all(self) -> tuple[Endpoint[TargetT], ...]:
        """Every endpoint, whatever its state, in the order of joining."""
        with self._lock:
            return tuple(self._by_id.values())

    def get(self, endpoint_id: str) -> Endpoint[TargetT] | None:
        """One by its id, if it is healthy."""
        endpoint = self._by_id.get(endpoint_id)
        return endpoint if endpoint is not None and endpoint.state is EndpointState.HEALTHY else None

    @property
    def healthy_count(self) -> int:
        """How many get messages now."""
        return len(self._healthy)

    @property
    def is_any_quarantined(self) -> bool:
        """Whether one of them may come back."""
        return any(endpoint.state is EndpointState.QUARANTINED for endpoint in self.all())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, endpoint_id: object) -> bool:
        return endpoint_id in self._by_id

    async def _ask(
        self, endpoint: Endpoint[TargetT], ping: Callable[[TargetT], Awaitable[bool]], timeout_seconds: float
    ) -> None:
        # In a task of its own, which is left alone when the time is up: one that ignores being cancelled, or cancels
        # itself, must not hold up or end the check.
        answer = asyncio.ensure_future(_answer(ping, endpoint.target))
        try:
            await asyncio.wait((answer,), timeout=timeout_seconds)
        finally:
            answer.cancel()
        self._judge(endpoint, well=answer.done() and not answer.cancelled() and answer.result())

    def _judge(self, endpoint: Endpoint[TargetT], *, well: bool) -> bool:
        """Note how it is, and tell the log if that is new."""
        state = EndpointState.HEALTHY if well else EndpointState.QUARANTINED
        with self._lock:
            if endpoint.state is EndpointState.LEAVING:
                return False
            endpoint.failures = 0 if well else endpoint.failures + 1
            if endpoint.state is state:
                return False
            endpoint.state = state
            self._sort_out()
        _log.log(
            logging.INFO if well else logging.WARNING,
            "endpoint restored" if well else "endpoint quarantined",
            extra={"dispatcher_id": self.dispatcher_id, "endpoint_id": endpoint.endpoint_id},
        )
        return True

    def _sort_out(self) -> None:
        self._healthy = tuple(one for one in self._by_id.values() if one.state is EndpointState.HEALTHY)

    def _watch(self, endpoint: Endpoint[TargetT]) -> "Future[None]":
        if endpoint.idle is None:
            endpoint.idle = Future()
            # From now on it cannot be cancelled: one who gives up waiting must not end it for all.
            endpoint.idle.set_running_or_notify_cancel()
        return endpoint.idle

    def _became_idle(self, endpoint: Endpoint[TargetT]) -> None:
        with self._lock:
            idle, endpoint.idle = endpoint.idle, None
            # By identity: another one may have joined with its id after it was gone.
            if endpoint.state is EndpointState.LEAVING and self._by_id.get(endpoint.endpoint_id) is endpoint:
                del self._by_id[endpoint.endpoint_id]
        if idle is not None:
            idle.set_result(None)


async def _answer(ping: Callable[[TargetT], Awaitable[bool]], target: TargetT) -> bool:
    try:
        return bool(await ping(target))
    except Exception:
        return False
