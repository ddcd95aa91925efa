"""The courier of rows: brings the parts of a shipment to replicas, whatever happens to those on the way."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError

from raydispatch.actors.choices import Choice
from raydispatch.actors.courier import BUSY_SECONDS, MOST_LOSSES, NO_REPLICA_SECONDS, Losses, Lost
from raydispatch.actors.plan import Target
from raydispatch.actors.rows import RowPart, RowReport, RowsDone, Shipment, joined, split_rows
from raydispatch.actors.wire import LOSSES, STORE_FULL
from raydispatch.dispatch.endpoints import Endpoint
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.errors import ErrorCode

CHUNK = 1_000
"""Rows of a handler of single messages that are worth a call of their own, to another replica."""
HOLD_SECONDS = 0.1
"""Between two looks at a circuit that is open, at most."""


class RowCourier:
    """Sends, waits for room or for a circuit, and sends again what was with a replica that died, if it may be."""

    def __init__(
        self, metrics: MetricsRecorder, bury: Callable[[RowPart, Outcome], None], on_loss: Callable[[], None]
    ) -> None:
        self._metrics = metrics
        self.bury = bury
        self._on_loss = on_loss

    async def send_all(
        self, shipment: Shipment, choices: list[Choice], targets: dict[str, Target], deadline: float
    ) -> list[RowsDone]:
        """What became of every row at each of its dispatchers; a higher priority ends before a lower one begins."""
        hold_until = monotonic() + shipment.hold_seconds
        done: list[RowsDone] = []
        for stage in range(max((len(choice.stages) for choice in choices), default=0)):
            parts = split_rows(shipment, choices, stage)
            reports = await asyncio.gather(
                *(
                    _Errand(self, targets.get(dispatcher_id), dispatcher_id, deadline, hold_until).run(part)
                    for dispatcher_id, _, part in parts
                )
            )
            done += [
                RowsDone(dispatcher_id, rows, report)
                for (dispatcher_id, rows, _), report in zip(parts, reports, strict=True)
            ]
        return done

    async def call(
        self, target: Target, endpoint: Endpoint[Any], part: RowPart, seconds: float
    ) -> RowReport | Lost | None:
        """One call to one replica: its report, that it was lost, or None if it has no room."""
        count = len(part.codes)
        target.endpoints.begun(endpoint, count)
        try:
            async with asyncio.timeout(seconds):
                report: RowReport | None = await endpoint.target.process_rows.remote(part)
            return report
        except STORE_FULL:
            return None
        except LOSSES:
            alone = endpoint.in_flight == count
            alone = target.endpoints.quarantine(endpoint.endpoint_id) and alone
            self._on_loss()
            return Lost(alone or part.alone)
        except TimeoutError:
            return self.ended(target.dispatcher_id, count, DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, _LATE)
        except RayError as error:
            words = f"the replica failed: {describe_exception(error)}"
            return self.lost(target.dispatcher_id, count, words)
        finally:
            target.endpoints.ended(endpoint, count)

    def ended(self, dispatcher_id: str, count: int, status: DispatchStatus, code: ErrorCode, message: str) -> RowReport:
        """An end that is made here: no replica has counted it."""
        outcome = Outcome(dispatcher_id, status, error_code=code, error_message=message)
        self._metrics.record_outcome(outcome, count)
        return RowReport.alike(outcome)

    def lost(self, dispatcher_id: str, count: int, message: str) -> RowReport:
        """They were with a replica that is gone."""
        return self.ended(dispatcher_id, count, DispatchStatus.DISPATCHER_ERROR, ErrorCode.REPLICA_LOST, message)


class _Errand:
    """One dispatcher's part of a shipment."""

    def __init__(
        self, courier: RowCourier, target: Target | None, dispatcher_id: str, deadline: float, hold_until: float
    ) -> None:
        self._courier = courier
        self._target = target or Target(dispatcher_id)
        self._is_there = target is not None
        self._id = dispatcher_id
        self._deadline = deadline
        self._hold_until = min(hold_until, deadline)

    async def run(self, part: RowPart) -> RowReport:
        """Where it has been already, or else spread over the replicas."""
        if not self._is_there:
            return self._courier.lost(self._id, len(part.codes), "it does not run")
        if part.resent:
            return await self._send_again(part)
        return await self._spread(part)

    async def _spread(self, part: RowPart) -> RowReport:
        """A batch handler's rows stay together as far as a replica takes them; others are for all replicas."""
        rule, count = self._target.rule, len(part.codes)
        pieces = -(-count // rule.max_in_flight)
        if not rule.batch:
            pieces = max(pieces, min(self._target.endpoints.healthy_count, -(-count // CHUNK)))
        if pieces <= 1:
            return await self._send(part)
        size = -(-count // pieces)
        starts = range(0, count, size)
        reports = await asyncio.gather(*(self._send(part.piece(start, start + size)) for start in starts))
        return joined(reports, [np.arange(start, min(start + size, count)) for start in starts])

    async def _send_again(self, part: RowPart) -> RowReport:
        """Rows that a lost router may have sent already: whoever knows one gets it, and answers from memory."""
        owners = await self._target.row_owners(part)
        reports = await asyncio.gather(*(self._send_to(owner, part.take(rows)) for owner, rows in owners))
        return joined(reports, [rows for _, rows in owners])

    async def _send_to(self, owner: Endpoint[Any] | None, part: RowPart) -> RowReport:
        if owner is not None:
            return await self._send(part, owner=owner)
        if self._target.rule.at_most_once:
            return self._courier.lost(self._id, len(part.codes), "a router was lost: it may have run")
        return await self._spread(part)

    async def _send(self, part: RowPart, losses: Losses | None = None, owner: Endpoint[Any] | None = None) -> RowReport:
        """Send until it has a report; rows that found the circuit open go again, if they may wait."""
        report = await self._send_once(part, losses, owner)
        while monotonic() < self._hold_until and (refused := _refused(report, len(part.codes))) is not None:
            # The replica may know of the open circuit before the router does, or be busy with the trial.
            await asyncio.sleep(min(self._hold_until - monotonic(), HOLD_SECONDS))
            await self._admitted()
            later = await self._send_once(part.take(refused), None, owner)
            kept = np.setdiff1d(np.arange(len(part.codes)), refused)
            report = joined([_take(report, kept), later], [kept, refused])
        return report

    async def _send_once(self, part: RowPart, losses: Losses | None, owner: Endpoint[Any] | None) -> RowReport:
        """Send to one replica, or, where there is no room, to another one."""
        courier, target, count = self._courier, self._target, len(part.codes)
        full: set[str] = set()
        pause = BUSY_SECONDS[0]
        while True:
            left = self._deadline - monotonic()
            if left <= 0:
                return courier.ended(self._id, count, DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, _LATE)
            if not await self._admitted():
                return courier.ended(self._id, count, DispatchStatus.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN, _REFUSED)
            endpoint = target.pick(full) if owner is None else None if full else owner
            if endpoint is None and full and target.rule.reject_when_full and owner is None:
                return courier.ended(self._id, count, DispatchStatus.REJECTED, ErrorCode.QUEUE_FULL, _FULL)
            if endpoint is None:
                await asyncio.sleep(min(left, pause if full else NO_REPLICA_SECONDS))
                pause = min(pause * 2, BUSY_SECONDS[1])
                full.clear()
                continue
            report = await courier.call(target, endpoint, part, left)
            if isinstance(report, Lost):
                return await self._recovered(part, losses or Losses(), report.alone)
            if report is not None:
                return report
            full.add(endpoint.endpoint_id)

    async def _admitted(self) -> bool:
        """Whether the circuit lets calls through, now or within the time that rows may be held."""
        while not self._target.admits():
            left = self._hold_until - monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(left, HOLD_SECONDS))
        return True

    async def _recovered(self, part: RowPart, losses: Losses, alone: bool) -> RowReport:
        """What was with a replica when it died: halves go on to others, until the one that kills them is alone."""
        count = len(part.codes)
        if self._target.rule.at_most_once:
            return self._courier.lost(self._id, count, "its replica was lost: it may have run")
        part = part._replace(resent=True, alone=False)
        if count > 1:
            # One after the other: side by side in one process, the half that kills would take the other one with it.
            half = count // 2
            reports = [await self._send(part.piece(0, half)), await self._send(part.piece(half, count))]
            return joined(reports, [np.arange(half), np.arange(half, count)])
        # Others that ran in the same process are as suspicious, and as likely innocent: only a loss alone counts.
        losses = Losses(losses.alone + alone, losses.all + 1)
        if losses.alone >= self._target.rule.tries or losses.all >= MOST_LOSSES:
            report = self._courier.lost(self._id, count, f"{losses.all} replicas were lost while it ran")
            self._courier.bury(part, report.kinds[0]._replace(route_id=part.route_ids[part.codes[0]]))
            return report
        return await self._send(part._replace(alone=alone or losses.all > 1), losses)


_LATE = "no outcome in time"
_REFUSED = "its circuit breaker is open: the handler was not called"
_FULL = "all its replicas are full"


def _refused(report: RowReport, count: int) -> npt.NDArray[np.int64] | None:
    """The rows that found the circuit open; None if none did."""
    open_kinds = np.array([kind.status is DispatchStatus.CIRCUIT_OPEN for kind in report.kinds])
    if not open_kinds.any():
        return None
    rows = np.flatnonzero(open_kinds[report.codes_of(count)])
    return rows if len(rows) else None


def _take(report: RowReport, rows: npt.NDArray[np.int64]) -> RowReport:
    durations = report.durations_ms
    return RowReport(
        report.kinds,
        None if report.codes is None else report.codes[rows],
        durations[rows] if isinstance(durations, np.ndarray) else durations,
    )
