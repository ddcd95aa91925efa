"""A router: matches, splits, sends and merges. It keeps nothing of a message, and never looks into one."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from raydispatch.actors.choices import Choices
from raydispatch.actors.circuit import Circuit
from raydispatch.actors.courier import NO_REPLICA_SECONDS, Courier
from raydispatch.actors.plan import Plan, Target
from raydispatch.actors.row_courier import RowCourier
from raydispatch.actors.rows import RowDelivery, RowPart, Shipment, row_choice
from raydispatch.actors.targets import Infirmary, targets_of
from raydispatch.actors.wire import Delivery, Key, Parcel, Selection
from raydispatch.dispatch.metrics import DispatchMetrics, MetricsRecorder
from raydispatch.dispatch.outcome import WORST_FIRST, DispatchStatus, Outcome, worst_status
from raydispatch.errors import ErrorCode
from raydispatch.messages.topic import category_of
from raydispatch.settings import SystemSettings

_SUCCESS = DispatchStatus.SUCCESS
_UNPLANNED = "the router found no controller in time, and knows no routes"


class RouterLoad(NamedTuple):
    """How a router is."""

    in_flight: int
    routed: int
    table_version: str
    pid: int
    generation: int


class Router:
    """Routes parcels by the table it holds. A parcel that has begun keeps its table to the end.

    Runs in one event loop: no locks.
    """

    def __init__(self, system: str, settings: SystemSettings, controller: Any) -> None:
        self._system = system
        self._settings = settings
        self._controller = controller
        self._plan: Plan | None = None
        self._targets: dict[str, Target] = {}
        self._choices = Choices()
        self._under_way: dict[int, int] = {}
        """Messages, by the generation of the plan that they are routed by."""
        self._routed = 0
        self._ended = asyncio.Event()
        self._metrics = MetricsRecorder(most_topics=settings.metric_topics)
        self._infirmary = Infirmary(lambda: self._targets, lambda: None)
        self._courier = Courier(self._metrics, self._bury, self._infirmary.watch)
        self._row_courier = RowCourier(self._metrics, self._bury_row, self._infirmary.watch)

    # Data

    async def route(self, parcel: Parcel) -> Delivery:
        """Send every message to its dispatchers, the higher priorities first, and put their outcomes together."""
        deadline = monotonic() + parcel.seconds
        plan = self._plan or await self._planned(deadline)
        if plan is None:
            return _unplanned(parcel)
        started = perf_counter()
        self._begun(plan, len(parcel.rows))
        try:
            choices = self._choices.of(plan.table, parcel.keys)
            routed_ms = (perf_counter() - started) * 1000.0
            items, lone = await self._courier.send_all(parcel, choices, self._targets, deadline)
        finally:
            self._begun(plan, -len(parcel.rows))
        self._routed += len(parcel.rows)
        selections = [choice.selection if lone is None else choice.selection.targets[0][1] for choice in choices]
        delivery = Delivery(plan.table.version, selections, items, lone)
        self._count(parcel, delivery, (perf_counter() - started) * 1000.0, routed_ms)
        return delivery

    async def route_rows(self, shipment: Shipment) -> RowDelivery:
        """As `route`, for the rows of a DataFrame."""
        deadline = monotonic() + shipment.seconds
        plan = self._plan or await self._planned(deadline)
        if plan is None:
            return shipment.nowhere(ErrorCode.TIME_LIMIT, _UNPLANNED, DispatchStatus.TIMEOUT)
        started = perf_counter()
        self._begun(plan, shipment.size)
        try:
            keys = [(key.topic or "", key.message_type or "") for key in shipment.keys]
            choices = list(map(row_choice, self._choices.of(plan.table, keys), shipment.keys))
            routed_ms = (perf_counter() - started) * 1000.0
            parts = await self._row_courier.send_all(shipment, choices, self._targets, deadline)
        finally:
            self._begun(plan, -shipment.size)
        self._routed += shipment.size
        delivery = RowDelivery(plan.table.version, [choice.selection for choice in choices], parts)
        self._count_rows(shipment, delivery, (perf_counter() - started) * 1000.0, routed_ms)
        return delivery

    # Control

    async def follow(self, plan: Plan) -> None:
        """Route by this from the next parcel on."""
        if self._plan is None or plan.generation >= self._plan.generation:
            self._adopt(plan)

    async def follow_circuit(self, dispatcher_id: str, circuit: Circuit) -> None:
        """The controller's word on one circuit."""
        target = self._targets.get(dispatcher_id)
        if target is not None:
            target.follow(circuit)

    async def plan(self) -> Plan | None:
        """What it was told last, for a controller that was restarted."""
        return self._plan and self._plan._replace(
            circuits={name: target.circuit for name, target in self._targets.items()}
        )

    async def circuit(self, dispatcher_id: str) -> Circuit | None:
        """What it was told of a circuit last; None of a dispatcher that it does not know."""
        target = self._targets.get(dispatcher_id)
        return None if target is None else target.circuit

    async def ping(self) -> bool:
        """It answers."""
        return True

    async def load(self) -> RouterLoad:
        """How busy it is."""
        version = self._plan.table.version if self._plan else ""
        generation = self._plan.generation if self._plan else 0
        return RouterLoad(sum(self._under_way.values()), self._routed, version, os.getpid(), generation)

    async def metrics(self) -> DispatchMetrics:
        """What it has counted since it was born."""
        return self._metrics.snapshot()

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing is under way; False if the time was too short."""
        return await self._wait_for(seconds, lambda: not self._under_way)

    async def settled(self, seconds: float) -> bool:
        """Wait until nothing is under way by an earlier plan, so that nobody is sent what only that one knew."""
        generation = self._plan.generation if self._plan else 0
        return await self._wait_for(seconds, lambda: all(older >= generation for older in self._under_way))

    async def _wait_for(self, seconds: float, condition: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _begun(self, plan: Plan, messages: int) -> None:
        """So many are under way by a plan, or so many less."""
        left = self._under_way.get(plan.generation, 0) + messages
        if left:
            self._under_way[plan.generation] = left
        else:
            self._under_way.pop(plan.generation, None)
            self._ended.set()

    # Knowing who is there

    async def _planned(self, deadline: float) -> Plan | None:
        """Born again, or asked early: the controller knows."""
        while self._plan is None:
            left = deadline - monotonic()
            if left <= 0:
                return None
            try:
                await self.follow(await asyncio.wait_for(self._controller.plan.remote(), min(left, 5)))
            except (RayError, TimeoutError):
                await asyncio.sleep(min(left, NO_REPLICA_SECONDS))
        return self._plan

    def _adopt(self, plan: Plan) -> None:
        self._targets = targets_of(plan, self._targets)
        self._plan = plan

    def _bury(self, key: Key, blob: bytes, outcome: Outcome) -> None:
        version = self._plan.table.version if self._plan else ""
        self._controller.bury_lost.remote(key, blob, outcome, version)

    def _bury_row(self, part: RowPart, outcome: Outcome) -> None:
        version = self._plan.table.version if self._plan else ""
        self._controller.bury_row.remote(part, outcome, version)

    def _count(self, parcel: Parcel, delivery: Delivery, duration_ms: float, routed_ms: float) -> None:
        """All messages of a parcel take the same time, so that those of one key and status count as one."""
        routed_each = routed_ms / max(1, len(parcel.keys))
        counted = [(parcel.keys[row][0], status, count) for (row, status), count in _ends(parcel, delivery).items()]
        self._metrics.record_many(
            ((topic, category_of(topic), status, count) for topic, status, count in counted), duration_ms, routed_each
        )

    def _count_rows(self, shipment: Shipment, delivery: RowDelivery, duration_ms: float, routed_ms: float) -> None:
        width = len(WORST_FIRST)
        ends = np.bincount(shipment.codes * width + delivery.statuses(shipment.codes))
        topics = [key.topic or "" for key in shipment.keys]
        self._metrics.record_many(
            (
                (topics[end // width], category_of(topics[end // width]), WORST_FIRST[end % width], int(ends[end]))
                for end in np.flatnonzero(ends).tolist()
            ),
            duration_ms,
            routed_ms / max(1, len(shipment.keys)),
        )


def _ends(parcel: Parcel, delivery: Delivery) -> dict[tuple[int, DispatchStatus], int]:
    """How many messages of each key ended how."""
    if delivery.lone is not None and set(map(type, delivery.items)) == {float}:
        return {(row, _SUCCESS): count for row, count in Counter(parcel.rows).items()}
    statuses = [_SUCCESS if one.fault is None else DispatchStatus(one.fault[0]) for one in delivery.by_key()]
    return Counter(
        (row, statuses[row])
        if all(type(item) is float for item in outcomes)
        else (row, worst_status([item for item in outcomes if isinstance(item, Outcome)]))
        for row, outcomes in zip(parcel.rows, delivery.by_message(), strict=True)
    )


def _unplanned(parcel: Parcel) -> Delivery:
    """Nobody could say in time where anything goes."""
    fault = (DispatchStatus.TIMEOUT.value, ErrorCode.TIME_LIMIT.value, _UNPLANNED)
    return Delivery("", [Selection((), fault)] * len(parcel.keys), [[] for _ in parcel.rows])


# No concurrency groups: in an async actor each would be a thread and an event loop of its own.
RouterActor = ray.remote(Router)
