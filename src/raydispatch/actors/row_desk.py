"""The desk where a replica works on rows: known ones are answered from memory, the rest by its handler."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raydispatch.actors.rows import RowPart, RowReport, joined
from raydispatch.delivery.dead_letters import FINAL_FAILURES, DeadLetter
from raydispatch.dispatch.dispatcher import Dispatcher
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.row_memory import Ids, RowMemory
from raydispatch.dispatch.sanitize import describe_exception
from raydispatch.dispatch.tables import TableRunner
from raydispatch.dispatch.workers import Workers
from raydispatch.errors import ErrorCode
from raydispatch.messages.batch import COLUMNS, NATIVE
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import uuid_of

MOST_LETTERS = 1_000
"""Dead letters of one part: the controller keeps no more than that by default."""

_SUCCESS = DispatchStatus.SUCCESS
_ID = pa.binary(16)


class RowDesk:
    """Works on parts of shipments. Runs in the replica's event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: "Workers[Any]",
        metrics: MetricsRecorder,
        remembered: int,
        bury: Callable[[Sequence[DeadLetter]], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._id = dispatcher.spec.dispatcher_id
        self._tables = TableRunner(dispatcher) if dispatcher.spec.batch else None
        self._workers = workers
        self._metrics = metrics
        self._memory = RowMemory(remembered)
        self._bury = bury
        self._under_way: dict[asyncio.Event, Ids] = {}

    def known(self, part: RowPart, content: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows it has handled, or is handling."""
        ids = _ids(content, part)
        known = np.zeros(len(ids), bool)
        known[self._memory.recall(ids)[0]] = True
        for others in self._under_way.values():
            known |= np.isin(ids[:, 0], others[:, 0])
        return known

    async def process(self, part: RowPart, content: pa.Table, version: str) -> RowReport:
        """What became of each row."""
        ids = _ids(content, part)
        if part.resent:
            await self._joined(ids)
        done = asyncio.Event()
        self._under_way[done] = ids
        try:
            known, outcomes = self._memory.recall(ids)
            if not len(known):
                return await self._run(part, content, ids, version)
            fresh = np.setdiff1d(np.arange(len(ids)), known)
            # They are not counted: they were, when they ran.
            reports, positions = [_of_each(outcomes)], [known]
            if len(fresh):
                reports.append(await self._run(part.take(fresh), content, ids[fresh], version))
                positions.append(fresh)
            return joined(reports, positions)
        finally:
            del self._under_way[done]
            done.set()

    async def _joined(self, ids: Ids) -> None:
        """Wait for those of them that run already: then they are known."""
        while (done := self._running(ids)) is not None:
            await done.wait()

    def _running(self, ids: Ids) -> asyncio.Event | None:
        return next((done for done, others in self._under_way.items() if np.isin(ids[:, 0], others[:, 0]).any()), None)

    async def _run(self, part: RowPart, content: pa.Table, ids: Ids, version: str) -> RowReport:
        if part.resent and self._dispatcher.spec.at_most_once:
            words = "it was sent before, and may have run: it is not run again"
            lost = Outcome(
                self._id, DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.REPLICA_LOST, error_message=words
            )
            self._metrics.record_outcome(lost, len(ids))
            return RowReport.alike(lost)
        started_at = datetime.now(UTC)
        if self._tables is not None:
            ended = await self._tables.run(_table(part, content))
            report = RowReport(ended.kinds, ended.codes if len(ended.kinds) > 1 else None, ended.duration_ms)
        else:
            report = await self._one_by_one(part, content)
        codes = report.codes_of(len(ids))
        self._count(report, codes)
        self._memory.keep(ids, report.kinds, codes)
        self._bury_failed(part, content, report, codes, version, started_at)
        return report

    async def _one_by_one(self, part: RowPart, content: pa.Table) -> RowReport:
        batch = RowsUnderWay(self._dispatcher, part, content)
        self._workers.add([(batch, index) for index in range(len(part.codes))])
        await batch.done
        return RowReport(list(batch.kinds), batch.codes if len(batch.kinds) > 1 else None, batch.durations_ms)

    def _count(self, report: RowReport, codes: npt.NDArray[np.int32]) -> None:
        if isinstance(report.durations_ms, float):
            # A kind may be of a try that was not the last one: then no row has ended so.
            counts = np.bincount(codes, minlength=len(report.kinds)).tolist()
            for kind, count in zip(report.kinds, counts, strict=True):
                if count:
                    self._metrics.record_outcome(kind._replace(duration_ms=report.durations_ms), count)
            return
        is_plain = np.array([kind.status is _SUCCESS for kind in report.kinds])[codes]
        self._metrics.record_successes(self._id, report.durations_ms[is_plain].tolist(), datetime.now(UTC))
        others = ~is_plain
        for code, duration in zip(codes[others].tolist(), report.durations_ms[others].tolist(), strict=True):
            self._metrics.record_outcome(report.kinds[code]._replace(duration_ms=duration))

    def _bury_failed(
        self,
        part: RowPart,
        content: pa.Table,
        report: RowReport,
        codes: npt.NDArray[np.int32],
        version: str,
        started_at: datetime,
    ) -> None:
        is_final = np.array([kind.status in FINAL_FAILURES for kind in report.kinds], bool)
        rows = np.flatnonzero(is_final[codes])[-MOST_LETTERS:]
        if not len(rows):
            return
        failed = part.take(rows)
        outcomes = [
            report.kinds[kind]._replace(route_id=part.route_ids[key])
            for kind, key in zip(codes[rows].tolist(), failed.codes.tolist(), strict=True)
        ]
        ended_at = datetime.now(UTC)
        self._bury(
            [
                DeadLetter(envelope.topic, envelope, outcome, started_at, ended_at, version)
                for envelope, outcome in zip(envelopes_of(failed, content), outcomes, strict=True)
            ]
        )


class RowsUnderWay:
    """Rows on their way through the workers, one by one."""

    __slots__ = ("_envelopes", "_left", "_part", "_run", "codes", "done", "durations_ms", "kinds")

    def __init__(self, dispatcher: Dispatcher, part: RowPart, content: pa.Table) -> None:
        self._run = dispatcher.run
        self._part = part
        self._envelopes = envelopes_of(part, content)
        self._left = len(part.codes)
        plain = Outcome(dispatcher.spec.dispatcher_id, _SUCCESS, attempts=1)
        self.kinds: dict[Outcome, int] = {plain: 0}
        self.codes = np.zeros(self._left, np.int32)
        self.durations_ms = np.zeros(self._left, np.float32)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def one(self, index: int) -> None:
        """Handle a row."""
        try:
            outcome = await self._run(self._envelopes[index], self._part.route_ids[self._part.codes[index]])
        except BaseException as error:
            # Nothing may leave the others waiting for ever.
            (plain, *_) = self.kinds
            failed = (ErrorCode.HANDLER_EXCEPTION, type(error).__name__, describe_exception(error))
            outcome = Outcome(plain.dispatcher_id, DispatchStatus.DISPATCHER_ERROR, None, (), 1, 0.0, *failed)
            if isinstance(error, asyncio.CancelledError):
                self._end(index, outcome)
                raise
        self._end(index, outcome)

    def _end(self, index: int, outcome: Outcome) -> None:
        self.durations_ms[index] = outcome.duration_ms
        if outcome.status is not _SUCCESS or outcome.attempts != 1 or outcome.outputs or outcome.repeated:
            kind = outcome._replace(route_id=None, duration_ms=0.0, reply=None)
            self.codes[index] = self.kinds.setdefault(kind, len(self.kinds))
        self._left -= 1
        if self._left == 0 and not self.done.done():
            self.done.set_result(None)


def _of_each(outcomes: Sequence[Outcome]) -> RowReport:
    kinds: dict[Outcome, int] = {}
    codes = np.array([kinds.setdefault(outcome, len(kinds)) for outcome in outcomes], np.int32)
    return RowReport(list(kinds), codes, 0.0)


def _rows(content: pa.Table, part: RowPart) -> pa.Table:
    return content if part.rows is None else content.take(pa.array(part.rows))


def _ids(content: pa.Table, part: RowPart) -> Ids:
    column = content["message_id"].combine_chunks()
    ids = np.frombuffer(column.buffers()[1], np.uint64, 2 * len(column), 16 * column.offset).reshape(-1, 2)
    return ids if part.rows is None else ids[part.rows]


def _table(part: RowPart, content: pa.Table) -> pa.Table:
    """What a batch handler gets: the columns of a `MessageBatch`, with the payload as it came."""
    rows = _rows(content, part)
    count = rows.num_rows
    codes = pa.array(part.codes)
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names}
    columns["topic"] = pa.array([key.topic for key in part.keys], pa.string()).take(codes)
    columns["message_type"] = pa.array([key.message_type for key in part.keys], pa.string()).take(codes)
    columns.setdefault("correlation_id", rows["message_id"])
    for name, number in (("attempt", 1 + part.resent), ("hops", 0), ("encoding", NATIVE)):
        columns[name] = pa.repeat(pa.scalar(number, COLUMNS.field(name).type), count)
    for field in COLUMNS:
        if field.name not in columns:
            columns[field.name] = pa.nulls(count, field.type)
    names = [*COLUMNS.names, "payload"]
    return pa.table([columns[name] for name in names], names=names)


def envelopes_of(part: RowPart, content: pa.Table) -> list[Envelope[Any]]:
    """The rows as single messages."""
    rows = _rows(content, part)
    nothing = [None] * rows.num_rows
    found = {
        name: rows[name].to_pylist(maps_as_pydicts="lossy") if name in rows.column_names else nothing
        for name in ("key", "traceparent", "payload")
    }
    ids = _uuids(rows["message_id"])
    correlations = _uuids(rows["correlation_id"]) if "correlation_id" in rows.column_names else ids
    keys = [part.keys[code] for code in part.codes.tolist()]
    attempt = 1 + part.resent
    return [
        Envelope.restored(
            payload, key.message_type or type(payload).__name__, key.topic or "", order, message_id, correlation_id,
            None, traceparent, None, attempt, 0,
        )
        for payload, key, order, message_id, correlation_id, traceparent in zip(
            found["payload"], keys, found["key"], ids, correlations, found["traceparent"], strict=True
        )
    ]  # fmt: skip


def _uuids(column: pa.ChunkedArray) -> list[UUID]:
    return [uuid_of(int.from_bytes(identity, "big")) for identity in column.to_pylist()]
