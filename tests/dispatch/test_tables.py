"""Batch handlers on whole tables: one call for all rows, and an outcome for each of them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.tables import TableOutcome, TableRunner
from raydispatch.errors import ErrorCode
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings
from raydispatch.testing.clock import FakeClock

TWICE = RetrySettings(tries=2, first_delay_seconds=0)
THRICE = RetrySettings(tries=3, first_delay_seconds=0)


class Desk:
    """A runner of the dispatcher `bulk`, whose handler notes each table and then answers by its plan."""

    def __init__(self, answer: Callable[[pa.Table], Any] = lambda table: None, **options: Any) -> None:
        self.tables: list[pa.Table] = []
        self.clock = FakeClock()
        self._answer = answer
        spec = DispatcherSpec("bulk", self._handle, MessageCategory.EVENT, batch=True, **{"retry": None, **options})
        self.dispatcher = Dispatcher(spec, clock=self.clock)

    def run(self, *tables: pa.Table) -> list[TableOutcome]:
        async def story() -> list[TableOutcome]:
            runner = TableRunner(self.dispatcher)
            return [await self.clock.run(runner.run(table)) for table in tables]

        return asyncio.run(story())

    async def _handle(self, table: pa.Table) -> Any:
        self.tables.append(table)
        answer = self._answer(table)
        return await answer if asyncio.iscoroutine(answer) else answer

    @property
    def state(self) -> CircuitState:
        assert self.dispatcher.breaker is not None
        return self.dispatcher.breaker.state

    @property
    def seen(self) -> list[list[int]]:
        """The rows of each call."""
        return [table["payload"].to_pylist() for table in self.tables]


def rows(*numbers: int) -> pa.Table:
    return pa.table({"payload": pa.array(numbers, pa.int64()), "attempt": pa.array([1] * len(numbers), pa.int32())})


def outcomes_of(found: TableOutcome) -> list[Outcome]:
    """For each row."""
    return [found.kinds[code] for code in found.codes.tolist()]


def statuses_of(found: TableOutcome) -> list[str]:
    return [outcome.status.value for outcome in outcomes_of(found)]


def failing(*numbers: int) -> Callable[[pa.Table], list[str]]:
    """Says of these rows that they failed, at every try."""

    def answer(table: pa.Table) -> list[str]:
        return ["dispatcher_error" if number in numbers else "success" for number in table["payload"].to_pylist()]

    return answer


def raising(error: Exception, times: int) -> Callable[[pa.Table], None]:
    """Raises in the first calls."""
    left = [error] * times

    def answer(table: pa.Table) -> None:
        if left:
            raise left.pop()

    return answer


# What a handler says


def test_a_handler_that_returns_nothing_has_succeeded_with_every_row() -> None:
    desk = Desk()

    (found,) = desk.run(rows(1, 2, 3))

    assert outcomes_of(found) == [Outcome("bulk", DispatchStatus.SUCCESS, attempts=1)] * 3
    assert desk.seen == [[1, 2, 3]]
    assert found.duration_ms > 0


def test_a_table_without_rows_is_no_call() -> None:
    desk = Desk()

    (found,) = desk.run(rows())

    assert outcomes_of(found) == []
    assert desk.seen == []


STATUSES = ["success", "dispatcher_error", "skipped"]


@pytest.mark.parametrize(
    "output",
    [
        STATUSES,
        tuple(STATUSES),
        [DispatchStatus(name) for name in STATUSES],
        pa.array(STATUSES),
        pa.array(STATUSES, pa.large_string()),
        pa.array(STATUSES).dictionary_encode(),
        pa.chunked_array([STATUSES[:1], STATUSES[1:]]),
        np.array(STATUSES),
        np.array(STATUSES, object),
    ],
    ids=lambda output: f"{type(output).__name__} {getattr(output, 'type', getattr(output, 'dtype', ''))}",
)
def test_each_row_has_its_own_status_in_whichever_way_it_is_said(output: Any) -> None:
    desk = Desk(lambda table: output)

    (found,) = desk.run(rows(1, 2, 3))

    assert statuses_of(found) == STATUSES


def test_a_status_that_is_no_success_names_itself_as_the_reason() -> None:
    (found,) = Desk(lambda table: ["timeout"]).run(rows(1))

    (outcome,) = outcomes_of(found)
    assert (outcome.status, outcome.error_code) == (DispatchStatus.TIMEOUT, ErrorCode.HANDLER_RESULT)
    assert outcome.error_message == "it returned the status timeout"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (["success"], "one status for each of 2 rows, not 1 statuses"),
        (["success"] * 3, "not 3 statuses"),
        ([], "not 0 statuses"),
        (["success", None], "not nulls among them"),
        (["success", "fine"], "'fine' is not a valid DispatchStatus"),
        (7, "its output is no list of statuses"),
        ([1, 2], "its output is no list of statuses"),
    ],
)
def test_an_output_that_cannot_be_read_fails_all_rows_and_is_not_asked_for_again(output: Any, words: str) -> None:
    desk = Desk(lambda table: output, retry=THRICE, breaker=BreakerSettings(failure_threshold=1))

    (found,) = desk.run(rows(1, 2))

    assert statuses_of(found) == ["dispatcher_error"] * 2
    (outcome, _) = outcomes_of(found)
    assert (outcome.error_code, outcome.attempts) == (ErrorCode.HANDLER_RESULT, 1)
    assert words in (outcome.error_message or "")
    assert len(desk.tables) == 1
    assert desk.state is CircuitState.CLOSED


def test_a_sync_handler_runs_in_a_thread() -> None:
    def handle(table: pa.Table) -> list[str]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return ["success"] * table.num_rows

    spec = DispatcherSpec("bulk", handle, MessageCategory.EVENT, batch=True, retry=None)

    found = asyncio.run(TableRunner(Dispatcher(spec)).run(rows(1, 2)))

    assert statuses_of(found) == ["success"] * 2


# Trying again


def test_only_the_rows_that_failed_are_tried_again() -> None:
    desk = Desk(failing(2, 4), retry=THRICE)

    (found,) = desk.run(rows(1, 2, 3, 4))

    assert desk.seen == [[1, 2, 3, 4], [2, 4], [2, 4]]
    assert [(outcome.status.value, outcome.attempts) for outcome in outcomes_of(found)] == [
        ("success", 1),
        ("dispatcher_error", 3),
        ("success", 1),
        ("dispatcher_error", 3),
    ]


def test_a_handler_that_raises_is_called_again_with_all_rows() -> None:
    desk = Desk(raising(OSError("down"), 1), retry=TWICE)

    (found,) = desk.run(rows(1, 2))

    assert desk.seen == [[1, 2], [1, 2]]
    assert outcomes_of(found) == [Outcome("bulk", DispatchStatus.SUCCESS, attempts=2)] * 2


def test_a_handler_that_raises_until_the_end_fails_every_row_that_was_left() -> None:
    def answer(table: pa.Table) -> list[str]:
        if table.num_rows == 1:
            raise OSError("down")
        return ["success", "timeout"]

    desk = Desk(answer, retry=TWICE)

    (found,) = desk.run(rows(1, 2))

    fine, failed = outcomes_of(found)
    assert (fine.status, fine.attempts) == (DispatchStatus.SUCCESS, 1)
    assert (failed.status, failed.error_code, failed.error_type, failed.attempts) == (
        DispatchStatus.DISPATCHER_ERROR,
        ErrorCode.HANDLER_EXCEPTION,
        "OSError",
        2,
    )


def test_skipped_rows_are_not_tried_again() -> None:
    desk = Desk(lambda table: ["skipped", "dispatcher_error"][-table.num_rows :], retry=TWICE)

    (found,) = desk.run(rows(1, 2))

    assert desk.seen == [[1, 2], [2]]
    assert [(outcome.status.value, outcome.attempts) for outcome in outcomes_of(found)] == [
        ("skipped", 1),
        ("dispatcher_error", 2),
    ]


def test_the_column_attempt_counts_the_tries_on_from_where_it_stood() -> None:
    desk = Desk(failing(2, 3), retry=THRICE)
    resent = rows(1, 2, 3).set_column(1, "attempt", pa.array([1, 1, 2], pa.int32()))

    desk.run(resent)

    assert [table["attempt"].to_pylist() for table in desk.tables] == [[1, 1, 2], [2, 3], [3, 4]]
    assert {table.schema for table in desk.tables} == {resent.schema}


def test_between_two_tries_there_is_a_pause() -> None:
    desk = Desk(raising(OSError("down"), 2), retry=RetrySettings(tries=3, first_delay_seconds=100))

    (found,) = desk.run(rows(1))

    assert statuses_of(found) == ["success"]
    assert desk.clock.now() > 0


def test_the_log_tells_of_rows_that_did_not_succeed_once_for_all(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(failing(1, 3), retry=TWICE)

    with caplog.at_level(logging.INFO, "raydispatch"):
        desk.run(rows(1, 2, 3))

    (record,) = caplog.records
    assert (record.message, record.levelno) == ("dispatcher did not succeed", logging.ERROR)
    assert (record.__dict__["rows"], record.__dict__["attempts"]) == (2, 2)


# The circuit


def test_calls_that_fail_as_a_whole_open_the_circuit_and_then_rows_are_refused() -> None:
    desk = Desk(raising(OSError("down"), 9), breaker=BreakerSettings(failure_threshold=2))

    *_, refused = desk.run(rows(1), rows(2), rows(3, 4))

    assert desk.state is CircuitState.OPEN
    assert desk.seen == [[1], [2]]
    (outcome, _) = outcomes_of(refused)
    assert statuses_of(refused) == ["circuit_open"] * 2
    assert (outcome.error_code, outcome.attempts) == (ErrorCode.CIRCUIT_OPEN, 0)


def test_a_call_in_which_no_row_succeeds_counts_as_a_failure() -> None:
    desk = Desk(failing(1, 2), breaker=BreakerSettings(failure_threshold=1))

    desk.run(rows(1, 2))

    assert desk.state is CircuitState.OPEN


def test_a_call_in_which_some_row_succeeds_counts_as_a_success() -> None:
    desk = Desk(failing(1), breaker=BreakerSettings(failure_threshold=2))

    desk.run(rows(1), rows(1, 2), rows(1))

    assert desk.state is CircuitState.CLOSED


def test_rows_left_out_on_purpose_say_nothing_against_the_handler() -> None:
    desk = Desk(lambda table: ["skipped"], breaker=BreakerSettings(failure_threshold=1))

    desk.run(rows(1))

    assert desk.state is CircuitState.CLOSED


def test_a_circuit_that_opens_between_two_tries_leaves_the_failure_that_did_happen() -> None:
    desk = Desk(failing(1), retry=THRICE, breaker=BreakerSettings(failure_threshold=1))

    first, second = desk.run(rows(1), rows(2))

    assert statuses_of(first) == ["dispatcher_error"]
    assert outcomes_of(first)[0].attempts == 1
    assert statuses_of(second) == ["circuit_open"]


def test_after_the_pause_a_table_is_the_trial_that_closes_the_circuit() -> None:
    desk = Desk(raising(OSError("down"), 1), breaker=BreakerSettings(failure_threshold=1, reset_after_seconds=60))
    desk.run(rows(1))

    desk.clock.tick(60)
    (found,) = desk.run(rows(2, 3))

    assert statuses_of(found) == ["success"] * 2
    assert desk.state is CircuitState.CLOSED


def test_a_call_that_is_cancelled_gives_its_trial_back() -> None:
    async def story() -> None:
        waiting = asyncio.Event()
        desk = Desk(lambda table: waiting.wait(), breaker=BreakerSettings(failure_threshold=1))
        breaker = desk.dispatcher.breaker
        assert breaker is not None
        breaker.open_for(0)

        running = asyncio.create_task(TableRunner(desk.dispatcher).run(rows(1)))
        await started(desk, 1)
        running.cancel()
        await asyncio.wait([running])

        assert running.cancelled()
        assert breaker.admit() is not None

    asyncio.run(story())


async def started(desk: Desk, calls: int) -> None:
    async with asyncio.timeout(5):
        while len(desk.tables) < calls:  # noqa: ASYNC110 - a handler has no event for its being called
            await asyncio.sleep(0)


def test_no_more_calls_run_at_once_than_the_dispatcher_allows() -> None:
    async def story() -> None:
        gate = asyncio.Event()
        desk = Desk(lambda table: succeed_after(gate), concurrency=2)
        runner = TableRunner(desk.dispatcher)

        running = [asyncio.create_task(runner.run(rows(number))) for number in range(5)]
        await started(desk, 2)
        for _ in range(20):
            await asyncio.sleep(0)
        at_once = len(desk.tables)
        gate.set()
        await asyncio.gather(*running)

        assert (at_once, len(desk.tables)) == (2, 5)

    asyncio.run(story())


async def succeed_after(gate: asyncio.Event) -> list[str]:
    await gate.wait()
    return ["success"]


async def fail_after(gate: asyncio.Event) -> None:
    await gate.wait()
    raise OSError("down")


def test_a_table_that_waits_for_its_turn_is_refused_if_the_circuit_opens_meanwhile() -> None:
    async def story() -> None:
        gate = asyncio.Event()
        desk = Desk(lambda table: fail_after(gate), concurrency=1, breaker=BreakerSettings(failure_threshold=1))
        runner = TableRunner(desk.dispatcher)

        running = asyncio.gather(runner.run(rows(1)), runner.run(rows(2)))
        await started(desk, 1)
        gate.set()
        first, second = await running

        assert statuses_of(first) == ["dispatcher_error"]
        assert statuses_of(second) == ["circuit_open"]
        assert desk.seen == [[1]]

    asyncio.run(story())


# Time


def test_a_call_that_takes_too_long_is_a_timeout_of_every_row() -> None:
    desk = Desk(lambda table: succeed_after(asyncio.Event()), time_limit_seconds=0.01)

    (found,) = desk.run(rows(1, 2))

    assert statuses_of(found) == ["timeout"] * 2
    (outcome, _) = outcomes_of(found)
    assert (outcome.error_code, outcome.error_message) == (
        ErrorCode.TIME_LIMIT,
        "it ran longer than its limit of 0.01 s",
    )


def test_a_call_that_took_too_long_is_tried_again() -> None:
    def answer(table: pa.Table) -> Any:
        return succeed_after(asyncio.Event()) if len(desk.tables) == 1 else None

    desk = Desk(answer, time_limit_seconds=0.01, retry=TWICE)

    (found,) = desk.run(rows(1))

    assert outcomes_of(found) == [Outcome("bulk", DispatchStatus.SUCCESS, attempts=2)]


# All together


@settings(max_examples=100, deadline=None)
@given(
    plans=st.lists(st.lists(st.sampled_from(DispatchStatus), min_size=3, max_size=3), max_size=8),
    tries=st.integers(1, 3),
)
def test_every_row_ends_as_if_it_had_been_tried_on_its_own(plans: Sequence[list[DispatchStatus]], tries: int) -> None:
    def answer(table: pa.Table) -> list[DispatchStatus]:
        call = len(desk.tables) - 1
        return [plans[number][call] for number in table["payload"].to_pylist()]

    desk = Desk(answer, retry=RetrySettings(tries=tries, first_delay_seconds=0), breaker=None)

    (found,) = desk.run(rows(*range(len(plans))))

    assert [(outcome.status, outcome.attempts) for outcome in outcomes_of(found)] == [
        alone(plan, tries) for plan in plans
    ]


def alone(plan: list[DispatchStatus], tries: int) -> tuple[DispatchStatus, int]:
    """How a row ends that says this at its tries."""
    last = next((number for number, status in enumerate(plan[:tries]) if not status.is_error()), tries - 1)
    return plan[last], last + 1
