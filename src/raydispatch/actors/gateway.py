"""The gateway: in the caller's process, between messages one by one and routers that want batches."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from time import monotonic, perf_counter
from typing import Any, NamedTuple, TypeAlias

from ray.exceptions import RayError

from raydispatch.actors.lane import Lane, Pending
from raydispatch.actors.results import results_of
from raydispatch.actors.rows import RowDelivery, Shipment
from raydispatch.actors.wire import LOSSES, STORE_FULL, Delivery, Message, Parcel, parcel_of
from raydispatch.dispatch.endpoints import Endpoint, Endpoints
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode, SystemUnavailable
from raydispatch.settings import SystemSettings

RESTORE_SECONDS = 0.5
"""Until a router that failed is tried again, while others do its work."""
GRACE_SECONDS = 5.0
"""For the way back of an answer that a router gives at the end of its time."""
RETRY_SECONDS = 0.05
"""Between two tries to find a router."""

FindRouters = Callable[[], Awaitable[Sequence[tuple[str, Any]]]]
"""Asks the controller for the routers: name and handle."""
OnVersion = Callable[[str], Awaitable[None]]
"""Is told when results of another table come back than those before."""

Cargo: TypeAlias = Parcel | Shipment
"""What can be sent."""


class Gateway:
    """Sends messages to the routers of one system; serves any number of event loops, each with a lane of its own."""

    def __init__(
        self, settings: SystemSettings, find_routers: FindRouters, on_version: OnVersion | None = None
    ) -> None:
        self._settings = settings
        self._find_routers = find_routers
        self._routers: Endpoints[Any] = Endpoints("routers")
        self._on_version = on_version
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}
        self._version = ""
        self._changing = threading.Lock()
        self._look_at = inf
        """When to ask for the routers again, since one of them failed."""
        self._looking: asyncio.Task[None] | None = None

    def send(self, message: Message) -> Pending:
        """Send one message, together with whatever else is waiting; the future is its result."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop) or self._new_lane(loop)
        return lane.send(message)

    def send_batch(self, messages: Sequence[Message]) -> Awaitable[list[DispatchResult]]:
        """Send these in one call, at once; to be awaited for their results."""
        started_at, started = datetime.now(UTC), perf_counter()
        parcel = parcel_of(messages, self._settings.call_seconds)
        return self._results(parcel, messages, self._call(parcel), started_at, started)

    async def send_rows(self, shipment: Shipment) -> RowDelivery:
        """Send rows of a DataFrame; never raises because of the cluster."""
        delivery: RowDelivery = await self._deliver(shipment, shipment.again, self._call(shipment))
        return delivery

    async def refresh(self) -> None:
        """Ask the controller who the routers are now."""
        found = dict(await self._find_routers())
        with self._changing:
            for endpoint in self._routers.all():
                # A system that was stopped and started again has routers of the same names that are others.
                if found.get(endpoint.endpoint_id) != endpoint.target:
                    self._routers.leave(endpoint.endpoint_id)
            for name, handle in found.items():
                if name in self._routers:
                    self._routers.restore(name)
                else:
                    self._routers.join(name, handle)

    async def drained(self) -> None:
        """Wait until nothing of this event loop is under way."""
        lane = self._lanes.get(asyncio.get_running_loop())
        while lane is not None and not lane.is_idle:
            await lane.changed()

    def _new_lane(self, loop: asyncio.AbstractEventLoop) -> Lane:
        # Other threads may do the same at this moment.
        for closed in [known for known in list(self._lanes) if known.is_closed()]:
            self._lanes.pop(closed, None)
        lane = self._lanes[loop] = Lane(self._settings, self.send_batch)
        return lane

    async def _results(
        self, parcel: Parcel, messages: Sequence[Message], call: "_Call | None", started_at: datetime, started: float
    ) -> list[DispatchResult]:
        def again() -> Parcel:
            return parcel._replace(resent=True, ids=[message.envelope.message_id.int for message in messages])

        delivery: Delivery = await self._deliver(parcel, again, call)
        if delivery.table_version and delivery.table_version != self._version:
            self._version = delivery.table_version
            if self._on_version is not None:
                await self._on_version(delivery.table_version)
        return results_of(delivery, parcel, messages, started_at, (perf_counter() - started) * 1000.0)

    def _call(self, cargo: Cargo) -> "_Call | None":
        """Call a router; None if there is none, or no place for what it must be sent."""
        router = self._routers.pick()
        if router is None:
            return None
        try:
            call = _Call(router, cargo.call(router.target))
        except (*STORE_FULL, *LOSSES):
            return None
        self._routers.begun(router, cargo.size)
        return call

    async def _deliver(self, cargo: Cargo, again: Callable[[], Cargo], call: "_Call | None") -> Any:
        """Try router after router until the time is up. Never raises because of the cluster."""
        deadline = monotonic() + cargo.seconds
        if monotonic() >= self._look_at:
            self._look_at = inf
            self._looking = asyncio.get_running_loop().create_task(self._look())
        while (left := deadline - monotonic()) > 0:
            call = call or self._call(cargo.within(left))
            if call is None:
                if (problem := await self._looked_again(cargo, left)) is not None:
                    return problem
                continue
            try:
                # The router keeps to the time that is left; a little more, for the way, before we give it up.
                # (Not wait_for: in Python 3.11 it may swallow that the caller was cancelled.)
                async with asyncio.timeout(left + GRACE_SECONDS):
                    return await call.reference
            except LOSSES:
                self._quarantine(call.router)
                cargo = again()
            except TimeoutError:
                self._quarantine(call.router)
                break
            except RayError as error:
                return cargo.nowhere(ErrorCode.REPLICA_LOST, f"the router failed: {describe_exception(error)}")
            finally:
                self._routers.ended(call.router, cargo.size)
            call = None
        return cargo.nowhere(ErrorCode.TIME_LIMIT, f"no outcome within {cargo.seconds:g} s", DispatchStatus.TIMEOUT)

    def _quarantine(self, router: Endpoint[Any]) -> None:
        self._routers.quarantine(router.endpoint_id)
        self._look_at = min(self._look_at, monotonic() + RESTORE_SECONDS)

    async def _look(self) -> None:
        with suppress(RayError, TimeoutError, SystemUnavailable):
            await asyncio.wait_for(self.refresh(), self._settings.call_seconds)

    async def _looked_again(self, cargo: Cargo, seconds: float) -> Any:
        """Find the routers; None if that may have helped, else why the system is gone."""
        is_first = len(self._routers) == 0
        try:
            await asyncio.wait_for(self.refresh(), seconds)
        except SystemUnavailable as error:
            return cargo.nowhere(ErrorCode.SHUT_DOWN, str(error), DispatchStatus.REJECTED)
        except (RayError, TimeoutError):
            pass  # The controller is being restarted.
        # A router that has failed, or the store, needs a moment, whatever the controller says of it.
        if not is_first or self._routers.pick() is None:
            await asyncio.sleep(RETRY_SECONDS)
        return None


class _Call(NamedTuple):
    """A call under way."""

    router: Endpoint[Any]
    reference: Any
