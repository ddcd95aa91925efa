"""Batch handlers on whole tables: breaker, tries and time limit around one call, and no Python object for a row."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raydispatch.dispatch.batching import Batching
from raydispatch.dispatch.dispatcher import REFUSED, Dispatcher, Failure
from raydispatch.dispatch.handler import Handler
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter

_log = logging.getLogger("raydispatch")


class TableOutcome(NamedTuple):
    """What became of the rows of a table: each outcome that is different once, and a code for each row."""

    kinds: list[Outcome]
    codes: npt.NDArray[np.int32]
    duration_ms: float


class TableRunner:
    """Runs a dispatcher's batch handler on tables. Only rows that failed are tried again.

    A call in which some row succeeded counts as a success of the dispatcher: its handler is well, those rows are not.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._id = dispatcher.spec.dispatcher_id
        self._slots = asyncio.Semaphore(dispatcher.spec.concurrency)

    async def run(self, table: pa.Table) -> TableOutcome:
        """The outcome of every row; nothing is raised."""
        started = perf_counter()
        kinds: dict[Outcome, int] = {}
        codes = np.zeros(table.num_rows, np.int32)
        waiting: npt.NDArray[np.int64] = np.arange(table.num_rows)
        failures: Sequence[Failure] = (REFUSED,)
        attempt = 0
        while len(waiting):
            ended = await self._try(_attempted(table, waiting, attempt + 1))
            if ended is None:
                # Between two tries, the failure that did happen says more than a refusal: the codes have it already.
                if attempt == 0:
                    codes[waiting] = kinds.setdefault(self._outcome(REFUSED, 0), len(kinds))
                break
            attempt += 1
            success = Outcome(self._id, DispatchStatus.SUCCESS, attempts=attempt)
            outcomes = [success, *(self._outcome(failure, attempt) for failure in ended.failures)]
            numbers = np.array([kinds.setdefault(outcome, len(kinds)) for outcome in outcomes], np.int32)
            codes[waiting] = numbers[ended.codes]
            may_help = np.array([False, *(failure.counts for failure in ended.failures)])
            waiting, failures = waiting[may_help[ended.codes]], ended.failures
            if attempt >= self._dispatcher.tries:
                break
            if len(waiting):
                fields = {"dispatcher_id": self._id, "rows": len(waiting), "error": failures[0].message}
                await self._dispatcher.pause(attempt, fields)
        if len(waiting):
            self._tell(failures[0], len(waiting), attempt)
        return TableOutcome(list(kinds), codes, (perf_counter() - started) * 1000.0)

    async def _try(self, table: pa.Table) -> "_Ended | None":
        """One call under the breaker; None if it refuses."""
        breaker = self._dispatcher.breaker
        async with self._slots:
            # Asked when the call begins: while it waited, others may have failed.
            permit = breaker.admit() if breaker is not None else None
            if permit is None and breaker is not None:
                return None
            try:
                found = await self._dispatcher.attempt(table, _call, _read)
            except BaseException:
                if breaker is not None and permit is not None:
                    breaker.withdrawn(permit)
                raise
        if found is None:
            ended = _Ended(np.zeros(table.num_rows, np.int32), ())
        elif isinstance(found, Failure):
            ended = _Ended(np.ones(table.num_rows, np.int32), (found,))
        else:
            ended = found
        if breaker is not None and permit is not None:
            is_well = table.num_rows == 0 or (ended.codes == 0).any() or not any(one.counts for one in ended.failures)
            breaker.succeeded(permit) if is_well else breaker.failed(permit)
        return ended

    def _outcome(self, failure: Failure, attempts: int) -> Outcome:
        return Outcome(
            self._id, failure.status, attempts=attempts, error_code=failure.code, error_type=failure.kind,
            error_message=failure.message,
        )  # fmt: skip

    def _tell(self, failure: Failure, rows: int, attempts: int) -> None:
        level = logging.ERROR if failure is not REFUSED else logging.DEBUG
        _log.log(
            level,
            "dispatcher did not succeed",
            extra={
                "dispatcher_id": self._id, "rows": rows, "status": failure.status.value, "attempts": attempts,
                "error_code": failure.code.value, "error": failure.message, "where": failure.where,
            },
        )  # fmt: skip


class _Ended(NamedTuple):
    """How a call ended for each row: 0 for success, else one more than the position of its failure."""

    codes: npt.NDArray[np.int32]
    failures: Sequence[Failure]


def _attempted(table: pa.Table, rows: npt.NDArray[np.int64], attempt: int) -> pa.Table:
    if len(rows) < table.num_rows:
        table = table.take(pa.array(rows))
    if attempt == 1:
        return table
    position = table.column_names.index("attempt")
    attempts = pc.add(table["attempt"], pa.scalar(attempt - 1, pa.int32()))
    return table.set_column(position, "attempt", attempts)


def _call(handler: Handler, table: pa.Table) -> Awaitable[object]:
    call = handler.call
    if not isinstance(call, Batching):
        raise RuntimeError("the dispatcher was stopped while rows were on their way to it")
    return call.call_table(table)


def _read(output: Any, table: pa.Table) -> "_Ended | Failure":
    """A status for each row, as strings or members: a list, an Arrow array, or a column of numpy or pandas."""
    try:
        found = pc.dictionary_encode(_array(output))
        statuses = [DispatchStatus(name) for name in found.dictionary.to_pylist()]
        if len(found) != table.num_rows or found.null_count:
            given = f"{len(found)} statuses" if not found.null_count else "nulls among them"
            raise InvalidParameter(
                f"A batch handler returns nothing or one status for each of {table.num_rows} rows, not {given}."
            )
    except Exception as error:
        # The handler did its work: running it again would do it twice.
        words = str(error) if isinstance(error, InvalidParameter) else f"its output is no list of statuses: {error}"
        return Failure(DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT, None, words, counts=False)
    failures: list[Failure] = []
    numbers = np.zeros(len(statuses), np.int32)
    for position, status in enumerate(statuses):
        if not status.is_successful():
            words = f"it returned the status {status}"
            failures.append(Failure(status, ErrorCode.HANDLER_RESULT, None, words, counts=status.is_error()))
            numbers[position] = len(failures)
    return _Ended(numbers[found.indices.to_numpy(zero_copy_only=False)], failures)


def _array(output: Any) -> pa.Array:
    if isinstance(output, pa.ChunkedArray):
        output = output.combine_chunks()
    if isinstance(output, pa.DictionaryArray):
        output = output.dictionary_decode()  # Its dictionary may have statuses that no row has.
    return output if isinstance(output, pa.Array) else pa.array(output, pa.string())
