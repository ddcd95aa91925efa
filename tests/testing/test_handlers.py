import asyncio
import pickle
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from raydispatch import DispatchEngine, DispatchResult, DispatchStatus, Envelope, MessageCategory, RetrySettings
from raydispatch.dispatch.handler import HandlerSource
from raydispatch.dispatch.outcome import Reply
from raydispatch.errors import InvalidParameter
from raydispatch.testing import FailingHandler, RecordingHandler

AT_ONCE = RetrySettings(tries=3, first_delay_seconds=0)


class OrderPlaced(BaseModel):
    order_id: int


async def bill(envelope: Envelope[OrderPlaced]) -> str:
    return f"order-{envelope.payload.order_id}.events"


def bill_now(envelope: Envelope[OrderPlaced]) -> str:
    return f"order-{envelope.payload.order_id}.events"


class Billing:
    def handle(self, envelope: Envelope[OrderPlaced]) -> None: ...


def send(handler: HandlerSource, *payloads: object) -> list[DispatchResult]:
    engine = DispatchEngine()
    engine.dispatcher("billing", topics="a.commands", category=MessageCategory.COMMAND, retry=AT_ONCE)(handler)
    engine.freeze()

    async def run() -> list[DispatchResult]:
        return [await engine.dispatch("a.commands", Envelope(payload)) for payload in payloads]

    return asyncio.run(run())


def test_a_recorder_keeps_what_it_gets() -> None:
    recorder = RecordingHandler()

    results = send(recorder, "one", "two")

    assert [result.status for result in results] == [DispatchStatus.SUCCESS] * 2
    assert recorder.payloads == ["one", "two"]
    assert [envelope.topic for envelope in recorder.envelopes] == ["a.commands"] * 2


async def reply_later(envelope: Envelope[Any]) -> Reply:
    return Reply(envelope.payload * 2)


@pytest.mark.parametrize("returns", [Reply(42), lambda envelope: Reply(envelope.payload * 2), reply_later])
def test_a_recorder_answers_as_it_was_told(returns: Any) -> None:
    (result,) = send(RecordingHandler(returns), 21)

    assert result.reply == Reply(42)


def test_a_recorder_can_be_waited_for() -> None:
    recorder = RecordingHandler()

    async def run() -> None:
        waiting = asyncio.create_task(recorder.wait_for(2))
        await recorder(Envelope(1))
        await recorder(Envelope(2))
        await waiting
        with pytest.raises(TimeoutError, match="2 of 3 messages"):
            await recorder.wait_for(3, limit_seconds=0.01)

    asyncio.run(run())


def test_a_failing_handler_fails_for_ever() -> None:
    handler = FailingHandler()

    (result,) = send(handler, "one")

    assert result.status is DispatchStatus.DISPATCHER_ERROR
    assert "planned failure" in (result.error_message or "")
    assert handler.calls == 3


def test_a_failing_handler_recovers_and_does_what_comes_then() -> None:
    recorder = RecordingHandler(returns=Reply("done"))
    handler = FailingHandler(times=2, then=recorder)

    first, second = send(handler, "one", "two")

    assert (first.reply, first.outcomes[0].attempts) == (Reply("done"), 3)
    assert (second.reply, second.outcomes[0].attempts) == (Reply("done"), 1)
    assert [envelope.attempt for envelope in recorder.envelopes] == [3, 1]


def test_without_a_then_it_just_succeeds() -> None:
    (result,) = send(FailingHandler(times=1), "one")

    assert result.status is DispatchStatus.SUCCESS


@pytest.mark.parametrize("error", [ConnectionError("down"), ConnectionError])
def test_the_error_can_be_chosen(error: Any) -> None:
    (result,) = send(FailingHandler(error=error), "one")

    assert result.outcomes[0].error_type == "ConnectionError"


def test_an_error_raised_often_gathers_no_tracebacks() -> None:
    handler = FailingHandler()

    def depth() -> int:
        with pytest.raises(RuntimeError) as raised:
            asyncio.run(handler(Envelope(1)))
        return len(raised.traceback)

    assert depth() == depth()


@pytest.mark.parametrize("then", [bill, bill_now, partial(bill)])
def test_payloads_are_checked_for_what_comes_then(then: Any) -> None:
    good, bad = send(FailingHandler(times=1, then=then), {"order_id": "7"}, {"order_id": "seven"})

    assert list(good.outputs) == ["order-7.events"]
    assert bad.status is DispatchStatus.INVALID_MESSAGE


@pytest.mark.parametrize("then", [Billing, Billing(), "billing"])
def test_what_comes_then_is_a_function(then: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"must be"):
        FailingHandler(times=1, then=then)


def test_a_failing_handler_can_be_waited_for() -> None:
    handler = FailingHandler(times=0)

    async def run() -> None:
        waiting = asyncio.create_task(handler.wait_for(1))
        await handler(Envelope(1))
        await waiting

    asyncio.run(run())


def test_they_pickle_with_what_they_know() -> None:
    recorder = RecordingHandler(returns="next.events")
    asyncio.run(recorder(Envelope("one")))

    copy = pickle.loads(pickle.dumps(recorder))
    failing = pickle.loads(pickle.dumps(FailingHandler(times=1, error=ConnectionError("down"), then=bill)))
    good, bad = send(failing, {"order_id": 7}, {"order_id": "seven"})

    assert (copy.payloads, copy.returns) == (["one"], "next.events")
    assert (good.outcomes[0].attempts, list(good.outputs)) == (2, ["order-7.events"])
    assert bad.status is DispatchStatus.INVALID_MESSAGE
