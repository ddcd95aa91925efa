"""Batch handlers: functions of an Arrow table. Messages that run at the same time share a call."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.batch import MessageBatch
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import new_id

Waiting = list[tuple[Envelope[Any], "asyncio.Future[DispatchResult | None]"]]


class Batching:
    """Makes a handler of one message out of a handler of a table.

    A batch goes when nothing has joined it for a turn of the event loop: nobody waits for a timer. Everything around
    handlers (breaker, tries, memory of ids) sees single messages, so that only rows that failed are tried again.
    """

    def __init__(self, call: Callable[[Any], Any], run_in_thread: Callable[..., Any]) -> None:
        self._call = call
        self._run_in_thread = run_in_thread
        self._is_async = inspect.iscoroutinefunction(call)
        self._waiting: dict[asyncio.AbstractEventLoop, Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, envelope: Envelope[Any]) -> DispatchResult | None:
        """Join the next batch; None for success, else a result that says what became of this row."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(loop)
        if waiting is None:
            waiting = self._waiting[loop] = []
            loop.call_soon(self._look, loop, 0)
        future: asyncio.Future[DispatchResult | None] = loop.create_future()
        waiting.append((envelope, future))
        return await future

    async def call_table(self, table: Any) -> Any:
        """What the handler says of a table that exists already."""
        return await (self._call(table) if self._is_async else self._run_in_thread(self._call, table))

    def _look(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        now = len(self._waiting[loop])
        if now > before:
            loop.call_soon(self._look, loop, now)
            return
        task = loop.create_task(self._run([entry for entry in self._waiting.pop(loop) if not entry[1].done()]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Waiting) -> None:
        good = _writable(batch)
        if not good:
            return
        try:
            table = MessageBatch.from_envelopes((envelope.topic, envelope) for envelope, _ in good).table
            results = _statuses(await self.call_table(table), len(good))
        except BaseException as error:
            for _, future in good:
                if not future.done():
                    future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (envelope, future), status in zip(good, results, strict=True):
            if not future.done():
                future.set_result(None if status.is_successful() else _result(envelope, status))


def _writable(batch: Waiting) -> Waiting:
    """Those whose payloads are data; each of the others hears of it, and costs the rest nothing."""
    good = []
    for envelope, future in batch:
        try:
            MessageBatch.from_envelopes([(envelope.topic, envelope)]) if _may_fail(envelope.payload) else None
        except InvalidParameter as error:
            message = str(error)
            future.set_result(_result(envelope, DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, message))
        else:
            good.append((envelope, future))
    return good


def _may_fail(payload: object) -> bool:
    return not isinstance(payload, bytes | int | float | bool | None)


def _statuses(output: object, count: int) -> Sequence[DispatchStatus]:
    if output is None:
        return [DispatchStatus.SUCCESS] * count
    found = [DispatchStatus(status) for status in output] if isinstance(output, Sequence) else None
    if found is None or len(found) != count:
        given = f"{len(found)} statuses" if found is not None else type(output).__name__
        raise InvalidParameter(f"A batch handler returns nothing or one status for each of {count} rows, not {given}.")
    return found


def _result(
    envelope: Envelope[Any], status: DispatchStatus, code: ErrorCode | None = None, message: str | None = None
) -> DispatchResult:
    return DispatchResult(new_id(), status, envelope.topic, error_code=code, error_message=message)
