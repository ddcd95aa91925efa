import asyncio
import logging
from typing import Any

import pytest

from raydispatch.dispatch.middleware import Middleware, Next, Process, chain
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope

FAILED = Outcome("billing", DispatchStatus.DISPATCHER_ERROR, "route", attempts=3, error_message="no")


class FakeDispatcher:
    """Remembers what reached it; reads plain outputs as topics."""

    def __init__(self, status: DispatchStatus = DispatchStatus.SUCCESS) -> None:
        self.status = status
        self.seen: list[tuple[object, str | None]] = []

    async def process(self, envelope: Envelope[Any], route_id: str | None) -> Outcome:
        self.seen.append((envelope.payload, route_id))
        return Outcome("billing", self.status, route_id, (), attempts=1)

    async def read(self, output: object, envelope: Envelope[Any]) -> Outcome:
        return Outcome("billing", DispatchStatus.SUCCESS, None, (str(output),))

    def run(self, *middleware: Middleware, payload: object = "hello") -> Outcome:
        process = chain(middleware, "billing", self.process, self.read)
        return asyncio.run(_awaited(process, Envelope(payload)))


async def _awaited(process: Process, envelope: Envelope[Any]) -> Outcome:
    return await process(envelope, "route")


def test_without_middleware_there_is_nothing_around_the_dispatcher() -> None:
    dispatcher = FakeDispatcher()
    last = dispatcher.process

    assert chain((), "billing", last, dispatcher.read) is last


def test_the_first_one_is_outermost() -> None:
    seen: list[str] = []

    def named(name: str) -> Middleware:
        async def middleware(envelope: Envelope[Any], call_next: Next) -> Outcome:
            seen.append(f"{name} in")
            outcome = await call_next(envelope)
            seen.append(f"{name} out")
            return outcome

        return middleware

    outcome = FakeDispatcher().run(named("a"), named("b"))

    assert seen == ["a in", "b in", "b out", "a out"]
    assert outcome == Outcome("billing", DispatchStatus.SUCCESS, "route", (), attempts=1)


def test_it_may_pass_on_another_envelope() -> None:
    dispatcher = FakeDispatcher()

    async def louder(envelope: Envelope[Any], call_next: Next) -> Outcome:
        return await call_next(envelope.with_payload(envelope.payload.upper()))

    dispatcher.run(louder)

    assert dispatcher.seen == [("HELLO", "route")]


def test_it_knows_the_dispatcher_it_stands_before() -> None:
    seen: list[str] = []

    async def curious(envelope: Envelope[Any], call_next: Next) -> Outcome:
        seen.append(call_next.dispatcher_id)
        return await call_next(envelope)

    FakeDispatcher().run(curious)

    assert seen == ["billing"]


def test_it_may_return_another_outcome() -> None:
    async def lenient(envelope: Envelope[Any], call_next: Next) -> Outcome:
        outcome = await call_next(envelope)
        return outcome._replace(status=DispatchStatus.SKIPPED)

    outcome = FakeDispatcher(DispatchStatus.DISPATCHER_ERROR).run(lenient)

    assert outcome == Outcome("billing", DispatchStatus.SKIPPED, "route", (), attempts=1)


def test_it_may_answer_in_the_dispatchers_place_with_an_outcome() -> None:
    dispatcher = FakeDispatcher()

    async def stored(envelope: Envelope[Any], call_next: Next) -> Outcome:
        return Outcome("billing", DispatchStatus.SUCCESS, None, ("x.events",), repeated=True)

    outcome = dispatcher.run(stored)

    assert dispatcher.seen == []
    assert outcome == Outcome("billing", DispatchStatus.SUCCESS, "route", ("x.events",), repeated=True)


@pytest.mark.parametrize("output", ["x.events", ["x.events"], None])
def test_it_may_answer_with_what_a_handler_returns(output: Any) -> None:
    dispatcher = FakeDispatcher()

    async def answering(envelope: Envelope[Any], call_next: Next) -> Any:
        return output

    outcome = dispatcher.run(answering)

    assert dispatcher.seen == []
    assert outcome == Outcome("billing", DispatchStatus.SUCCESS, "route", (str(output),))


def test_those_further_out_see_an_outcome_whatever_those_further_in_return() -> None:
    seen: list[object] = []

    async def watching(envelope: Envelope[Any], call_next: Next) -> Outcome:
        outcome = await call_next(envelope)
        seen.append(outcome)
        return outcome

    async def answering(envelope: Envelope[Any], call_next: Next) -> str:
        return "x.events"

    outcome = FakeDispatcher().run(watching, answering)

    assert seen == [outcome]
    assert outcome.route_id == "route"


def test_a_forgotten_return_does_not_make_a_success_of_a_failure() -> None:
    async def forgetful(envelope: Envelope[Any], call_next: Next) -> None:
        await call_next(envelope)

    outcome = FakeDispatcher(DispatchStatus.TIMEOUT).run(forgetful)

    assert outcome.status is DispatchStatus.TIMEOUT


def test_it_may_call_the_dispatcher_twice() -> None:
    dispatcher = FakeDispatcher()

    async def insistent(envelope: Envelope[Any], call_next: Next) -> Outcome:
        await call_next(envelope)
        return await call_next(envelope)

    dispatcher.run(insistent)

    assert dispatcher.seen == [("hello", "route")] * 2


def test_an_outcome_stored_elsewhere_gets_the_ids_of_here() -> None:
    async def stored(envelope: Envelope[Any], call_next: Next) -> Outcome:
        return Outcome("shipping", DispatchStatus.SUCCESS, "another route")

    outcome = FakeDispatcher().run(stored)

    assert outcome == Outcome("billing", DispatchStatus.SUCCESS, "route")


def test_one_that_raises_is_an_outcome_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    envelope = Envelope("hello")
    dispatcher = FakeDispatcher()

    class Broken:
        async def __call__(self, envelope: Envelope[Any], call_next: Next) -> Outcome:
            raise OSError("password=hunter2")

    process = chain([Broken()], "billing", dispatcher.process, dispatcher.read)
    outcome = asyncio.run(_awaited(process, envelope))

    assert outcome._replace(duration_ms=0.0) == Outcome(
        "billing",
        DispatchStatus.DISPATCHER_ERROR,
        "route",
        error_code=ErrorCode.MIDDLEWARE_EXCEPTION,
        error_type="OSError",
        error_message="OSError: password=[REDACTED]",
    )
    (line,) = caplog.records
    assert (line.levelno, line.message) == (logging.ERROR, "middleware failed")
    fields = vars(line)
    assert (fields["dispatcher_id"], fields["correlation_id"]) == ("billing", str(envelope.correlation_id))
    assert fields["middleware"].endswith("Broken")
    assert "hunter2" not in str(fields)


def test_one_that_raises_after_the_handler_ran_says_how_often_it_ran() -> None:
    async def broken(envelope: Envelope[Any], call_next: Next) -> Outcome:
        await call_next(envelope)
        raise OSError

    outcome = FakeDispatcher().run(broken)

    assert (outcome.error_code, outcome.attempts) == (ErrorCode.MIDDLEWARE_EXCEPTION, 1)


def test_one_that_raises_is_an_outcome_to_those_further_out() -> None:
    seen: list[ErrorCode | None] = []

    async def watching(envelope: Envelope[Any], call_next: Next) -> Outcome:
        outcome = await call_next(envelope)
        seen.append(outcome.error_code)
        return outcome

    async def broken(envelope: Envelope[Any], call_next: Next) -> Outcome:
        raise OSError

    FakeDispatcher().run(watching, broken)

    assert seen == [ErrorCode.MIDDLEWARE_EXCEPTION]


def test_cancellation_passes_through() -> None:
    async def waiting(envelope: Envelope[Any], call_next: Next) -> Outcome:
        await asyncio.Event().wait()
        return FAILED

    async def cancel_it() -> None:
        dispatcher = FakeDispatcher()
        task = asyncio.create_task(
            _awaited(chain([waiting], "billing", dispatcher.process, dispatcher.read), Envelope("hello"))
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_it())


def test_messages_at_the_same_time_keep_their_routes_apart() -> None:
    dispatcher = FakeDispatcher()

    async def slow(envelope: Envelope[Any], call_next: Next) -> Outcome:
        await asyncio.sleep(0)
        return await call_next(envelope)

    async def both() -> list[Outcome]:
        process = chain([slow, slow], "billing", dispatcher.process, dispatcher.read)
        return list(await asyncio.gather(process(Envelope(1), "first"), process(Envelope(2), "second")))

    outcomes = asyncio.run(both())

    assert [outcome.route_id for outcome in outcomes] == ["first", "second"]
    assert sorted(dispatcher.seen, key=str) == [(1, "first"), (2, "second")]
