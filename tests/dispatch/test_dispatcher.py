import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel, field_validator

from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.endpoints import EndpointState
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, Reply
from raydispatch.errors import EndpointLost, ErrorCode
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


# Outputs


class Outbox:
    """Takes outputs as long as it has room."""

    def __init__(self, room: int = 10) -> None:
        self.taken: list[Envelope[Any]] = []
        self._room = room

    async def accept(self, outputs: Sequence[Envelope[Any]]) -> bool:
        await asyncio.sleep(0)
        if len(outputs) > self._room:
            return False
        self.taken += outputs
        return True


def publishing(returned: Any, outbox: Outbox, **options: Any) -> Dispatcher:
    async def handle(envelope: Envelope[Any]) -> Any:
        return returned

    spec = DispatcherSpec("billing", handle, MessageCategory.EVENT, retry=ONCE)
    return Dispatcher(spec, clock=FakeClock(), publish=outbox.accept, **options)


def test_outputs_go_to_the_outbox_and_their_topics_into_the_outcome() -> None:
    outbox = Outbox()

    outcome = process(publishing(["a.events", Reply(7), Envelope(1, topic="b.events")], outbox))

    assert outcome[:5] == ("billing", DispatchStatus.SUCCESS, "route", ("a.events", "b.events"), 1)
    assert outcome.reply == Reply(7)
    assert [envelope.topic for envelope in outbox.taken] == ["a.events", "b.events"]


@pytest.mark.parametrize("returned", [None, [], Reply(7)])
def test_without_outputs_the_outbox_is_not_asked(returned: Any) -> None:
    assert process(publishing(returned, Outbox(room=-1))).status is DispatchStatus.SUCCESS


def test_without_room_publishing_has_failed_and_the_handler_has_not() -> None:
    dispatcher = publishing(["a.events", Reply(7)], Outbox(room=0))

    outcome = process(dispatcher)

    assert (outcome.status, outcome.error_code) == (DispatchStatus.PUBLISH_FAILED, ErrorCode.OUTBOX_FULL)
    assert (outcome.outputs, outcome.reply, outcome.attempts) == (("a.events",), Reply(7), 1)
    assert dispatcher.breaker is not None
    assert dispatcher.breaker.failures == 0


@pytest.mark.parametrize(("hops", "status"), [(2, DispatchStatus.SUCCESS), (3, DispatchStatus.PUBLISH_FAILED)])
def test_a_chain_is_no_longer_than_allowed(hops: int, status: DispatchStatus) -> None:
    outbox = Outbox()
    dispatcher = publishing(["a.events", "b.events"], outbox, max_hops=3)

    outcome = asyncio.run(dispatcher.process(Envelope("hello", hops=hops)))

    assert outcome.status is status
    assert outcome.error_code is (ErrorCode.HOP_LIMIT if status.is_error() else None)
    assert len(outbox.taken) == (0 if status.is_error() else 2)


def test_a_message_that_goes_on_is_the_one_the_handler_saw_checked_and_all() -> None:
    async def handle(envelope: Envelope[int]) -> str:
        return "a.events"

    outbox = Outbox()
    spec = DispatcherSpec("billing", handle, MessageCategory.EVENT)
    process(Dispatcher(spec, publish=outbox.accept), "7")

    assert outbox.taken[0].payload == 7


def test_dispatchers_of_one_id_and_different_origin_make_different_ids() -> None:
    outbox, envelope = Outbox(), Envelope("hello")

    for origin in (None, "session job-1/billing", None):
        asyncio.run(publishing("a.events", outbox, origin=origin).process(envelope))

    first, in_session, again = (sent.message_id for sent in outbox.taken)
    assert first == again != in_session


@pytest.mark.parametrize(
    ("answer", "status", "outputs"),
    [
        ("a.events", DispatchStatus.SUCCESS, ("a.events",)),
        (None, DispatchStatus.SUCCESS, ()),
        (7, DispatchStatus.DISPATCHER_ERROR, ()),
        (result_of(DispatchStatus.SKIPPED), DispatchStatus.SKIPPED, ()),
        (result_of(DispatchStatus.SUCCESS, ("b.events",)), DispatchStatus.SUCCESS, ("b.events",)),
    ],
)
def test_an_answer_in_the_handlers_place_is_read_like_the_handlers(
    answer: Any, status: DispatchStatus, outputs: tuple[str, ...]
) -> None:
    outbox = Outbox()

    outcome = asyncio.run(publishing("never.events", outbox).read(answer, Envelope("hello")))

    assert (outcome.status, outcome.outputs, outcome.attempts) == (status, outputs, 0)
    assert tuple(envelope.topic for envelope in outbox.taken) == outputs


# Endpoints


def test_each_replica_is_built_for_itself() -> None:
    built: list[object] = []

    class Connected:
        def __init__(self) -> None:
            built.append(self)

        async def handle(self, envelope: Envelope[Any]) -> None: ...

    dispatcher = make_dispatcher(Connected, replicas=3)
    asyncio.run(dispatcher.start())

    assert [endpoint.endpoint_id for endpoint in dispatcher.endpoints.all()] == ["billing-1", "billing-2", "billing-3"]
    assert len(built) == 3


def test_a_lost_endpoint_uses_up_no_try() -> None:
    calls: list[int] = []

    async def handle(envelope: Envelope[Any]) -> str:
        calls.append(envelope.attempt)
        if len(calls) < 3:
            raise EndpointLost
        return "next.events"

    dispatcher = make_dispatcher(handle, replicas=3, retry=ONCE)
    outcome = process(dispatcher)

    assert (outcome.status, outcome.attempts, calls) == (DispatchStatus.SUCCESS, 1, [1, 1, 1])
    states = sorted(info.state for info in dispatcher.endpoints.find())
    assert states == [EndpointState.HEALTHY, EndpointState.QUARANTINED, EndpointState.QUARANTINED]


def test_all_endpoints_lost_is_a_failure_that_is_tried_again() -> None:
    clock = FakeClock()

    outcome = process(make_dispatcher(raising(EndpointLost()), clock, retry=RetrySettings(tries=2)))

    assert (outcome.status, outcome.attempts) == (DispatchStatus.DISPATCHER_ERROR, 2)
    assert outcome.error_code is ErrorCode.NO_HEALTHY_ENDPOINT
    assert len(clock.sleeps) == 1


def test_a_lost_endpoint_is_asked_again_after_the_health_interval() -> None:
    clock, lost = FakeClock(), [EndpointLost()]

    async def handle(envelope: Envelope[Any]) -> None:
        if lost:
            raise lost.pop()

    dispatcher = make_dispatcher(handle, clock, retry=ONCE)
    first, too_soon = process(dispatcher), process(dispatcher)
    clock.seconds += 5
    later = process(dispatcher)

    assert first.error_code is too_soon.error_code is ErrorCode.NO_HEALTHY_ENDPOINT
    assert later.status is DispatchStatus.SUCCESS


def test_it_is_idle_when_its_last_call_has_ended() -> None:
    async def story() -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def handle(envelope: Envelope[Any]) -> None:
            begun.set()
            await gate.wait()

        dispatcher = make_dispatcher(handle, replicas=2)
        await dispatcher.idle()
        running = asyncio.create_task(dispatcher.process(Envelope("hello")))
        await begun.wait()
        idle = asyncio.create_task(dispatcher.idle())
        for _ in range(3):
            await asyncio.sleep(0)
        busy = not idle.done()
        gate.set()
        await idle

        assert busy
        assert (await running).status is DispatchStatus.SUCCESS

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_replica_that_fails_to_stop_does_not_keep_the_others_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopped: list[int] = []

    class Connected:
        def handle(self, envelope: Envelope[Any]) -> None: ...

        def stop(self) -> None:
            stopped.append(1)
            if len(stopped) == 1:
                raise OSError("password=hunter2")

    async def story() -> None:
        dispatcher = make_dispatcher(Connected, replicas=3)
        await dispatcher.start()
        await dispatcher.stop()

    asyncio.run(story())

    assert len(stopped) == 3
    assert [record.__dict__["error"] for record in caplog.records] == ["OSError: password=[REDACTED]"]


# What nobody cancelled


@pytest.mark.parametrize("limit", [None, 60.0])
@pytest.mark.parametrize("where", ["handle", "start"])
def test_waiting_for_something_cancelled_is_a_failure_like_any_other(where: str, limit: float | None) -> None:
    async def careless() -> None:
        lost = asyncio.ensure_future(asyncio.Event().wait())
        lost.cancel()
        await lost

    class Careless:
        async def start(self) -> None:
            if where == "start":
                await careless()

        async def handle(self, envelope: Envelope[Any]) -> None:
            await careless()

    outcome = process(make_dispatcher(Careless, retry=RetrySettings(tries=2), time_limit_seconds=limit))

    assert (outcome.status, outcome.attempts) == (DispatchStatus.DISPATCHER_ERROR, 2)
    assert outcome.error_type == "CancelledError"


class Fussy(BaseModel):
    password: str

    @field_validator("password")
    @classmethod
    def look_up(cls, value: str) -> str:
        raise KeyError(value)


def test_a_validator_that_breaks_is_the_messages_end_and_shows_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(envelope: Envelope[Fussy]) -> None: ...

    outcome = process(make_dispatcher(handle), {"password": "hunter2"})

    assert (outcome.status, outcome.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID)
    assert (outcome.error_type, outcome.error_message) == ("KeyError", "its payload could not be checked: KeyError")
    assert "hunter2" not in str([record.__dict__ for record in caplog.records])
