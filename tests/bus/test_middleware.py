import asyncio
import logging
import pickle
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from raydispatch.bus.middleware import Deduplication, RateLimit, Timing, Validation
from raydispatch.dispatch.middleware import Middleware, Next
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope


class FakeTime:
    """Sleeps at once, and remembers for how long."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)


class OrderPlaced(BaseModel):
    number: int


def ending(status: DispatchStatus, dispatcher_id: str = "billing") -> Next:
    """The rest of the way, which ends like this."""

    async def process(envelope: Envelope[Any], route_id: str | None) -> Outcome:
        return Outcome(dispatcher_id, status, route_id, (), attempts=1)

    return Next(dispatcher_id, process, "route")


def outcome_of(middleware: Middleware, next_: Next, envelope: Envelope[Any] | None = None) -> Outcome:
    async def run() -> Any:
        return await middleware(envelope or Envelope("hello"), next_)

    outcome = asyncio.run(run())
    assert isinstance(outcome, Outcome)
    return outcome


def statuses(middleware: Middleware, next_: Next, envelopes: list[Envelope[Any]]) -> list[DispatchStatus]:
    return [outcome_of(middleware, next_, envelope).status for envelope in envelopes]


SUCCESS, SKIPPED, REJECTED = DispatchStatus.SUCCESS, DispatchStatus.SKIPPED, DispatchStatus.REJECTED


def test_timing_is_recorded() -> None:
    seen: list[tuple[str, str, float, DispatchStatus]] = []
    timing = Timing(lambda *fields: seen.append(fields))

    outcome = outcome_of(timing, ending(DispatchStatus.TIMEOUT))

    ((dispatcher_id, message_type, milliseconds, status),) = seen
    assert (dispatcher_id, message_type, status) == ("billing", "str", DispatchStatus.TIMEOUT)
    assert milliseconds > 0
    assert outcome.status is DispatchStatus.TIMEOUT


def test_timing_goes_to_the_log_if_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "raydispatch"):
        outcome_of(Timing(), ending(SUCCESS))

    (line,) = caplog.records
    fields = vars(line)
    assert (line.levelno, line.message) == (logging.DEBUG, "dispatcher timed")
    assert (fields["dispatcher_id"], fields["message_type"], fields["status"]) == ("billing", "str", "success")
    assert fields["duration_ms"] > 0


def test_a_record_that_fails_leaves_the_outcome_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*fields: object) -> None:
        raise OSError("disk full")

    outcome = outcome_of(Timing(broken), ending(SUCCESS))

    (line,) = caplog.records
    assert outcome.status is SUCCESS
    assert (line.levelno, line.message) == (logging.ERROR, "timing was not recorded")
    assert vars(line)["error"] == "OSError: disk full"


def test_beyond_the_rate_messages_are_rejected() -> None:
    clock = FakeTime()
    limit = RateLimit(10, burst=2, now=clock)
    next_ = ending(SUCCESS)

    at_once = [outcome_of(limit, next_) for _ in range(3)]
    clock.seconds += 0.1
    later = outcome_of(limit, next_)

    assert [outcome.status for outcome in at_once] == [SUCCESS, SUCCESS, REJECTED]
    assert (at_once[2].error_code, at_once[2].attempts) == (ErrorCode.RATE_LIMITED, 0)
    assert at_once[2].error_message == "its rate limit of 10 messages a second is reached"
    assert later.status is SUCCESS


def test_each_dispatcher_has_a_rate_of_its_own() -> None:
    limit = RateLimit(1, now=FakeTime())

    seen = [outcome_of(limit, ending(SUCCESS, name)).status for name in ("a", "a", "b", "b")]

    assert seen == [SUCCESS, REJECTED, SUCCESS, REJECTED]


def test_messages_may_wait_for_their_turn() -> None:
    clock = FakeTime()
    limit = RateLimit(10, burst=1, wait=True, now=clock, sleep=clock.sleep)

    seen = statuses(limit, ending(SUCCESS), [Envelope(n) for n in range(3)])

    assert seen == [SUCCESS] * 3
    assert clock.sleeps == pytest.approx([0.1, 0.2])


def test_a_rate_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(InvalidParameter):
        RateLimit(0)


def test_a_message_that_was_handled_is_skipped() -> None:
    envelope = Envelope("hello")
    deduplication = Deduplication()
    next_ = ending(SUCCESS)

    first, second = (outcome_of(deduplication, next_, envelope) for _ in range(2))

    assert first.status is SUCCESS
    assert (second.status, second.error_code, second.attempts) == (SKIPPED, ErrorCode.DUPLICATE_MESSAGE, 0)


@pytest.mark.parametrize("status", [one for one in DispatchStatus if one is not SUCCESS])
def test_a_message_that_did_not_succeed_may_come_again(status: DispatchStatus) -> None:
    envelope = Envelope("hello")
    deduplication = Deduplication()

    outcome_of(deduplication, ending(status), envelope)
    again = outcome_of(deduplication, ending(SUCCESS), envelope)

    assert again.status is SUCCESS


def test_each_dispatcher_handles_a_message_once() -> None:
    envelope = Envelope("hello")
    deduplication = Deduplication()

    seen = [outcome_of(deduplication, ending(SUCCESS, name), envelope).status for name in ("a", "b", "a", "b")]

    assert seen == [SUCCESS, SUCCESS, SKIPPED, SKIPPED]


class Held:
    """A dispatcher that keeps a message until it is let go."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def process(self, envelope: Envelope[Any], route_id: str | None) -> Outcome:
        await self.release.wait()
        return Outcome("billing", SUCCESS, route_id)

    def next(self) -> Next:
        return Next("billing", self.process, "route")


def test_a_message_that_is_being_handled_is_skipped() -> None:
    envelope = Envelope("hello")
    deduplication = Deduplication()

    async def send_twice() -> list[DispatchStatus]:
        held = Held()
        first = asyncio.create_task(deduplication(envelope, held.next()))
        await asyncio.sleep(0)
        second = await asyncio.wait_for(deduplication(envelope, held.next()), 5)
        held.release.set()
        return [(await first).status, second.status]

    assert asyncio.run(send_twice()) == [SUCCESS, SKIPPED]


def test_a_message_whose_handling_was_cancelled_may_come_again() -> None:
    envelope = Envelope("hello")
    deduplication = Deduplication()

    async def cancel_it() -> None:
        task = asyncio.create_task(deduplication(envelope, Held().next()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_it())

    assert outcome_of(deduplication, ending(SUCCESS), envelope).status is SUCCESS


@given(capacity=st.integers(1, 12), sent=st.lists(st.integers(0, 30), max_size=80))
def test_at_least_half_of_the_capacity_is_remembered_and_never_more_than_all_of_it(
    capacity: int, sent: list[int]
) -> None:
    deduplication = Deduplication(capacity)
    next_ = ending(SUCCESS)
    handled: list[int] = []

    async def send_all() -> None:
        for number in sent:
            outcome = await deduplication(Envelope("x", message_id=UUID(int=number)), next_)
            if outcome.status is SUCCESS:
                assert number not in handled[-((capacity + 1) // 2) :]
                handled.append(number)
            else:
                assert number in handled[-capacity:]

    asyncio.run(send_all())


def test_a_memory_must_hold_something() -> None:
    with pytest.raises(InvalidParameter, match="capacity must be"):
        Deduplication(0)


@pytest.mark.parametrize("payload", [{"number": 7}, '{"number": 7}', b'{"number": 7}', OrderPlaced(number=7)])
def test_a_payload_that_fits_goes_on_as_an_instance(payload: object) -> None:
    seen: list[Envelope[Any]] = []

    async def process(envelope: Envelope[Any], route_id: str | None) -> Outcome:
        seen.append(envelope)
        return Outcome("billing", SUCCESS, route_id)

    envelope = Envelope(payload, message_type="OrderPlaced")
    outcome = outcome_of(Validation({"OrderPlaced": OrderPlaced}), Next("billing", process, None), envelope)

    assert outcome.status is SUCCESS
    assert [(one.payload, one.message_id) for one in seen] == [(OrderPlaced(number=7), envelope.message_id)]


@pytest.mark.parametrize("payload", [{"number": "hunter2"}, '{"number": "hunter2"}', "hunter2", None])
def test_a_payload_that_does_not_fit_is_invalid_and_not_shown(payload: object) -> None:
    validation = Validation({"OrderPlaced": OrderPlaced})

    outcome = outcome_of(validation, ending(SUCCESS), Envelope(payload, message_type="OrderPlaced"))

    assert (outcome.status, outcome.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID)
    assert (outcome.error_type, outcome.attempts) == ("ValidationError", 0)
    assert outcome.error_message
    assert "hunter2" not in outcome.error_message


def test_other_message_types_pass_unseen() -> None:
    validation = Validation({"OrderPlaced": OrderPlaced})

    assert outcome_of(validation, ending(SUCCESS), Envelope("anything")).status is SUCCESS


@pytest.mark.parametrize(
    "make",
    [Timing, lambda: RateLimit(5, burst=1), lambda: RateLimit(1_000_000, wait=True), Deduplication,
     lambda: Validation({"str": str})],
    ids=["timing", "rate limit", "waiting rate limit", "deduplication", "validation"],
)  # fmt: skip
def test_all_can_be_pickled_and_leave_their_memories_behind(make: Callable[[], Middleware]) -> None:
    envelope = Envelope("hello")
    used = make()
    outcome_of(used, ending(SUCCESS), envelope)

    arrived = pickle.loads(pickle.dumps(used))

    assert outcome_of(arrived, ending(SUCCESS), envelope).status is SUCCESS


def test_what_was_asked_for_travels_along() -> None:
    arrived = pickle.loads(pickle.dumps(RateLimit(1, burst=2)))

    assert statuses(arrived, ending(SUCCESS), [Envelope(n) for n in range(3)]) == [SUCCESS, SUCCESS, REJECTED]
