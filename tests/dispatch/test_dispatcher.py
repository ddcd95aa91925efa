import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BreakerSettings, RetrySettings

ONCE = RetrySettings(tries=1)


class FakeClock:
    """Sleeps at once, and remembers for how long."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(0)


def make_dispatcher(source: Any, clock: FakeClock | None = None, **options: Any) -> Dispatcher:
    spec = DispatcherSpec("billing", source, MessageCategory.EVENT, **options)
    return Dispatcher(spec, clock=clock or FakeClock())


def process(dispatcher: Dispatcher, payload: object = "hello") -> Outcome:
    return asyncio.run(dispatcher.process(Envelope(payload), "route"))


def raising(error: BaseException) -> Callable[[Envelope[Any]], Any]:
    async def handle(envelope: Envelope[Any]) -> None:
        raise error

    return handle


def result_of(status: DispatchStatus, outputs: tuple[str, ...] = (), message: str | None = None) -> DispatchResult:
    now = datetime.now(UTC)
    return DispatchResult(
        uuid4(), status, "a.events", MessageCategory.EVENT, "str", None, None, 0.0, now, now, outputs, message
    )


async def async_function(envelope: Envelope[Any]) -> str:
    return "next.events"


def sync_function(envelope: Envelope[Any]) -> str:
    return "next.events"


class AsyncClass:
    async def handle(self, envelope: Envelope[Any]) -> str:
        return "next.events"


class SyncClass:
    def handle(self, envelope: Envelope[Any]) -> str:
        return "next.events"


@pytest.mark.parametrize(
    "source", [async_function, sync_function, AsyncClass, SyncClass, AsyncClass(), SyncClass()], ids=repr
)
def test_every_way_to_write_a_handler_works(source: Any) -> None:
    outcome = process(make_dispatcher(source))

    assert outcome[:5] == ("billing", DispatchStatus.SUCCESS, "route", ("next.events",), 1)


@pytest.mark.parametrize(
    ("returned", "outputs"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
)
def test_a_handler_returns_nothing_a_topic_or_several(returned: Any, outputs: tuple[str, ...]) -> None:
    outcome = process(make_dispatcher(lambda envelope: returned))

    assert outcome.status is DispatchStatus.SUCCESS
    assert outcome.outputs == outputs


@pytest.mark.parametrize("returned", [7, {"a": 1}, [1], [""], " ", b"topic", ["a", None]])
def test_a_wrong_return_value_is_an_error_and_the_handler_is_not_run_again(returned: Any) -> None:
    calls: list[int] = []

    def handle(envelope: Envelope[Any]) -> Any:
        calls.append(1)
        return returned

    dispatcher = make_dispatcher(handle, breaker=BreakerSettings(failure_threshold=1))
    outcome = process(dispatcher)

    assert outcome.status is DispatchStatus.DISPATCHER_ERROR
    assert outcome.error_code is ErrorCode.HANDLER_RESULT
    assert len(calls) == outcome.attempts == 1
    assert dispatcher.breaker is not None
    assert dispatcher.breaker.state is CircuitState.CLOSED


def test_a_handler_may_return_a_result_of_its_own() -> None:
    good = process(make_dispatcher(lambda envelope: result_of(DispatchStatus.SUCCESS, ("a", "b"))))
    bad = process(
        make_dispatcher(lambda envelope: result_of(DispatchStatus.PUBLISH_FAILED, (), "password=hunter2"), retry=ONCE)
    )

    assert good.outputs == ("a", "b")
    assert bad.status is DispatchStatus.PUBLISH_FAILED
    assert bad.error_message == "password=[REDACTED]"


def test_a_message_that_a_handler_skips_is_not_tried_again() -> None:
    clock = FakeClock()

    outcome = process(make_dispatcher(lambda envelope: result_of(DispatchStatus.SKIPPED), clock))

    assert (outcome.status, outcome.attempts, clock.sleeps) == (DispatchStatus.SKIPPED, 1, [])


def test_a_failing_handler_is_tried_again_with_the_next_attempt_number() -> None:
    clock = FakeClock()
    attempts: list[int] = []

    async def handle(envelope: Envelope[Any]) -> None:
        attempts.append(envelope.attempt)
        if len(attempts) < 3:
            raise OSError("down")

    outcome = process(make_dispatcher(handle, clock, retry=RetrySettings(first_delay_seconds=1)))

    assert attempts == [1, 2, 3]
    assert (outcome.status, outcome.attempts) == (DispatchStatus.SUCCESS, 3)
    assert len(clock.sleeps) == 2
    assert clock.sleeps[0] <= 1
    assert clock.sleeps[1] <= 2


def test_after_the_last_try_the_failure_is_the_outcome() -> None:
    clock = FakeClock()

    outcome = process(make_dispatcher(raising(OSError("down")), clock, retry=RetrySettings(tries=4)))

    assert (outcome.status, outcome.attempts) == (DispatchStatus.DISPATCHER_ERROR, 4)
    assert (outcome.error_code, outcome.error_type) == (ErrorCode.HANDLER_EXCEPTION, "OSError")
    assert outcome.error_message == "OSError: down"
    assert len(clock.sleeps) == 3


def test_without_retries_there_is_one_try() -> None:
    assert process(make_dispatcher(raising(OSError("down")), retry=None)).attempts == 1


def test_a_retry_that_the_open_breaker_refuses_keeps_the_failure() -> None:
    dispatcher = make_dispatcher(
        raising(OSError("down")), retry=RetrySettings(tries=5), breaker=BreakerSettings(failure_threshold=2)
    )

    outcome = process(dispatcher)

    assert (outcome.status, outcome.attempts) == (DispatchStatus.DISPATCHER_ERROR, 2)
    assert outcome.error_message == "OSError: down"


def test_an_open_circuit_refuses_without_calling() -> None:
    clock = FakeClock()
    dispatcher = make_dispatcher(
        raising(OSError("down")), clock, retry=ONCE, breaker=BreakerSettings(failure_threshold=1)
    )
    process(dispatcher)

    refused = process(dispatcher)
    clock.seconds += 60
    tried = process(dispatcher)

    assert (refused.status, refused.attempts) == (DispatchStatus.CIRCUIT_OPEN, 0)
    assert refused.error_code is ErrorCode.CIRCUIT_OPEN
    assert tried.status is DispatchStatus.DISPATCHER_ERROR


def test_without_a_breaker_nothing_is_refused() -> None:
    dispatcher = make_dispatcher(raising(OSError("down")), retry=ONCE, breaker=None)

    outcomes = [process(dispatcher) for _ in range(10)]

    assert {outcome.status for outcome in outcomes} == {DispatchStatus.DISPATCHER_ERROR}


def test_an_async_handler_over_its_limit_times_out() -> None:
    async def handle(envelope: Envelope[Any]) -> None:
        await asyncio.Event().wait()

    outcome = process(make_dispatcher(handle, retry=ONCE, time_limit_seconds=0.01))

    assert (outcome.status, outcome.error_code) == (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT)
    assert "0.01 s" in (outcome.error_message or "")


def test_a_sync_handler_over_its_limit_times_out() -> None:
    released = threading.Event()

    async def run() -> Outcome:
        dispatcher = make_dispatcher(lambda envelope: released.wait(20), retry=ONCE, time_limit_seconds=0.01)
        try:
            return await dispatcher.process(Envelope("hello"))
        finally:
            released.set()

    outcome = asyncio.run(run())

    assert (outcome.status, outcome.error_code) == (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT)


@pytest.mark.parametrize("limit", [None, 60.0])
@pytest.mark.parametrize("error", [TimeoutError(), TimeoutError("x")], ids=repr)
@pytest.mark.parametrize("cause", [None, OSError("line cut")], ids=repr)
def test_a_timeout_of_the_handlers_own_is_its_error(
    limit: float | None, error: TimeoutError, cause: OSError | None
) -> None:
    async def handle(envelope: Envelope[Any]) -> None:
        raise error from cause

    outcome = process(make_dispatcher(handle, retry=ONCE, time_limit_seconds=limit))

    assert (outcome.status, outcome.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION)
    assert outcome.error_type == "TimeoutError"


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_cancellation_from_outside_goes_on_and_withdraws_the_trial(limit: float | None) -> None:
    clock = FakeClock()
    entered: list[int] = []

    async def handle(envelope: Envelope[Any]) -> None:
        entered.append(1)
        if len(entered) == 1:
            raise OSError("down")
        await asyncio.Event().wait()

    dispatcher = make_dispatcher(
        handle, clock, retry=ONCE, breaker=BreakerSettings(failure_threshold=1), time_limit_seconds=limit
    )

    async def cancel_the_trial() -> bool:
        await dispatcher.process(Envelope("hello"))
        clock.seconds += 60
        trial = asyncio.create_task(dispatcher.process(Envelope("hello")))
        await asyncio.sleep(0)
        trial.cancel()
        await asyncio.wait([trial])
        return trial.cancelled()

    assert asyncio.run(cancel_the_trial())
    assert len(entered) == 2
    assert dispatcher.breaker is not None
    assert dispatcher.breaker.state is CircuitState.HALF_OPEN
    assert dispatcher.breaker.admit() is not None


def test_stop_iteration_from_a_sync_handler_is_an_error_like_any_other() -> None:
    def handle(envelope: Envelope[Any]) -> str:
        return next(iter(()))

    outcome = process(make_dispatcher(handle, retry=ONCE))

    assert outcome.status is DispatchStatus.DISPATCHER_ERROR
    assert "StopIteration" in (outcome.error_message or "")


def test_a_failing_start_is_the_outcome_and_is_tried_again_next_time() -> None:
    starts: list[int] = []

    class Connected:
        def start(self) -> None:
            starts.append(1)
            if len(starts) == 1:
                raise ConnectionError("token=hunter2")

        def handle(self, envelope: Envelope[Any]) -> str:
            return "next.events"

    dispatcher = make_dispatcher(Connected, retry=ONCE)
    first, second, third = (process(dispatcher) for _ in range(3))

    assert (first.status, first.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.START_FAILED)
    assert first.error_message == "ConnectionError: token=[REDACTED]"
    assert second.status is third.status is DispatchStatus.SUCCESS
    assert len(starts) == 2


def test_a_payload_that_does_not_fit_is_never_handled() -> None:
    calls: list[int] = []

    async def handle(envelope: Envelope[int]) -> None:
        calls.append(envelope.payload)

    outcome = process(make_dispatcher(handle), {"password": "hunter2"})

    assert (outcome.status, outcome.attempts) == (DispatchStatus.INVALID_MESSAGE, 0)
    assert outcome.error_code is ErrorCode.PAYLOAD_INVALID
    assert "hunter2" not in (outcome.error_message or "")
    assert not calls


def test_the_log_tells_where_it_failed_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="raydispatch"):
        process(make_dispatcher(raising(OSError("api_key=hunter2")), retry=RetrySettings(tries=2)))

    again, failed = caplog.records
    assert (again.levelno, failed.levelno) == (logging.DEBUG, logging.ERROR)
    assert failed.__dict__["dispatcher_id"] == "billing"
    assert failed.__dict__["attempts"] == 2
    assert "test_dispatcher.py" in failed.__dict__["where"]
    assert "hunter2" not in str([record.__dict__ for record in caplog.records])


def test_the_circuit_announces_its_changes_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="raydispatch"):
        process(make_dispatcher(raising(OSError("x")), retry=ONCE, breaker=BreakerSettings(failure_threshold=1)))

    assert ("circuit open", logging.WARNING) in [(record.message, record.levelno) for record in caplog.records]


def test_a_slow_sync_handler_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    spec = DispatcherSpec("billing", sync_function, MessageCategory.EVENT)

    with caplog.at_level(logging.WARNING, logger="raydispatch"):
        process(Dispatcher(spec, slow_sync_handler_seconds=-1.0))

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
