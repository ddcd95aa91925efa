import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, TypeVar

import pytest

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Reply
from raydispatch.errors import (
    ChannelClosed,
    DuplicateReply,
    ErrorCode,
    InvalidParameter,
    InvalidState,
    LateReply,
    RequestFailed,
    RequestTimeout,
    UnknownReply,
)
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import EngineSettings, RetrySettings

T = TypeVar("T")

INTENT, COMMAND = MessageCategory.INTENT, MessageCategory.COMMAND
ASK, FARTHER = "weather.intents.ask", "weather.intents.ask-farther"
ONCE = RetrySettings(tries=1)


def make_engine(*handlers: Any, topics: tuple[str, ...] = (ASK, FARTHER), **settings: Any) -> DispatchEngine:
    """The first handler is asked, the second one can be asked by it."""
    engine = DispatchEngine(settings=EngineSettings(**settings))
    for name, topic, handler in zip("abc", topics, handlers, strict=False):
        engine.dispatcher(name, topics=topic, category=INTENT, retry=ONCE, breaker=None)(handler)
    engine.freeze()
    return engine


def returning(value: Any) -> Any:
    async def handle(envelope: Envelope[Any]) -> Any:
        return value

    return handle


async def hanging(envelope: Envelope[Any]) -> None:
    await asyncio.Event().wait()


def waiting(engine: DispatchEngine) -> int:
    return len(engine._requester.correlations)


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


# Replies


@pytest.mark.parametrize("output", [Reply(12), [Reply(12), "weather.events"]])
def test_a_request_gets_its_handlers_reply(output: Any) -> None:
    engine = make_engine(returning(output))

    assert run(engine.request(ASK, Envelope("Graz"))) == Reply(12)
    assert waiting(engine) == 0


def test_a_reply_may_come_from_down_the_chain() -> None:
    engine = make_engine(returning(FARTHER), returning(["weather.intents.last"]), returning(Reply("cloudy")),
                         topics=(ASK, FARTHER, "weather.intents.last"))  # fmt: skip

    assert run(engine.request(ASK, Envelope("Oslo"))) == Reply("cloudy")


def test_a_reply_may_come_from_an_envelope_that_follows_up() -> None:
    async def ask(envelope: Envelope[Any]) -> Envelope[Any]:
        return envelope.follow_up({"place": envelope.payload}, FARTHER)

    async def answer(envelope: Envelope[Any]) -> Reply:
        return Reply(envelope.payload)

    assert run(make_engine(ask, answer).request(ASK, Envelope("Oslo"))) == Reply({"place": "Oslo"})


def test_a_reply_may_come_from_what_a_handler_published() -> None:
    async def ask(envelope: Envelope[Any]) -> None:
        await engine.publish(FARTHER, envelope.follow_up("Oslo", FARTHER))

    engine = make_engine(ask, returning(Reply("cloudy")))

    assert run(engine.request(ASK, Envelope(1))) == Reply("cloudy")


def test_a_reply_may_come_from_outside_and_from_another_thread() -> None:
    async def story() -> Reply:
        engine = make_engine(returning(None))
        envelope = Envelope("Graz")
        asking = asyncio.create_task(engine.request(ASK, envelope))
        await until(lambda: waiting(engine))

        thread = threading.Thread(target=engine.reply, args=(envelope.correlation_id, "12 degrees"))
        thread.start()
        reply = await asking
        thread.join()

        return reply

    assert run(story()) == Reply("12 degrees")


@pytest.mark.parametrize("verb", ["execute", "dispatch"])
def test_a_command_inside_of_a_handler_does_not_answer_the_handlers_request(verb: str) -> None:
    engine = DispatchEngine()

    @engine.dispatcher("outer", topics=ASK, category=INTENT)
    async def outer(envelope: Envelope[Any]) -> Reply:
        send = getattr(engine, verb)
        result: DispatchResult = await send("weather.commands", envelope.follow_up("?", "weather.commands"))
        return Reply(("outer", result.reply))

    @engine.dispatcher("inner", topics="weather.commands", category=COMMAND)
    async def inner(envelope: Envelope[Any]) -> Reply:
        return Reply("inner")

    engine.freeze()

    assert run(engine.request(ASK, Envelope(1))) == Reply(("outer", Reply("inner")))


def test_of_two_dispatchers_that_reply_the_first_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(returning(Reply(1)), returning(Reply(2)), topics=(ASK, ASK))

    reply = run(engine.request(ASK, Envelope("Graz")))

    assert reply == Reply(1)
    assert [record.__dict__["error_code"] for record in caplog.records] == ["duplicate_reply"]


def test_a_thousand_requests_at_once_each_get_their_own_reply() -> None:
    random = Random(7)

    async def answer(envelope: Envelope[Any]) -> Reply | str:
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        return FARTHER if envelope.topic == ASK and random.random() < 0.5 else Reply(envelope.payload)

    async def story() -> list[Reply]:
        return await asyncio.gather(*(engine.request(ASK, Envelope(number)) for number in range(1_000)))

    engine = make_engine(answer, answer)

    assert run(story()) == [Reply(number) for number in range(1_000)]
    assert waiting(engine) == 0


def test_requests_from_several_threads_each_get_their_own_reply() -> None:
    async def answer(envelope: Envelope[Any]) -> Reply | str:
        await asyncio.sleep(0)
        return FARTHER if envelope.topic == ASK else Reply(envelope.payload)

    async def story(start: int) -> list[Reply]:
        return await asyncio.gather(*(engine.request(ASK, Envelope(start + number)) for number in range(100)))

    engine = make_engine(answer, answer)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda start: asyncio.run(story(start)), range(0, 400, 100)))

    assert [reply.payload for each in replies for reply in each] == list(range(400))


# No replies


@pytest.mark.parametrize(
    ("topic", "handler", "status", "code"),
    [
        ("weather.intents.tomorrow", None, DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER),
        ("weather.tomorrow", None, DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
        (ASK, returning(7), DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT),
    ],
)
def test_a_request_that_fails_fails_at_once_with_the_result(
    topic: str, handler: Any, status: DispatchStatus, code: ErrorCode
) -> None:
    engine = make_engine(handler or hanging)

    with pytest.raises(RequestFailed) as caught:
        run(engine.request(topic, Envelope(1)))

    assert (caught.value.result.status, caught.value.error_code) == (status, code)
    assert waiting(engine) == 0


def test_a_failure_down_the_chain_leaves_the_request_waiting() -> None:
    async def fail(envelope: Envelope[Any]) -> None:
        raise OSError("down")

    with pytest.raises(RequestTimeout):
        run(make_engine(returning(FARTHER), fail).request(ASK, Envelope(1), timeout=0.02))


def test_a_request_without_a_reply_times_out_and_its_message_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        gate = asyncio.Event()

        async def slow(envelope: Envelope[Any]) -> Reply:
            await gate.wait()
            return Reply("too late")

        engine = make_engine(slow, request_timeout_seconds=0.01)
        with pytest.raises(RequestTimeout) as caught:
            await engine.request(ASK, envelope)
        left = waiting(engine)
        gate.set()
        await until(lambda: engine.get_structured_metrics().total_dispatches)

        assert caught.value.correlation_id == envelope.correlation_id
        assert left == 0

    envelope = Envelope("Atlantis")
    run(story())

    (record,) = [record for record in caplog.records if record.message == "reply not delivered"]
    assert record.__dict__["error_code"] == "late_reply"
    assert record.__dict__["correlation_id"] == str(envelope.correlation_id)


def test_replies_that_nobody_waits_for_are_told_apart() -> None:
    async def story() -> None:
        engine = make_engine(returning(Reply(1)), hanging)
        answered, late = Envelope(1), Envelope(2)
        await engine.request(ASK, answered)
        with pytest.raises(RequestTimeout):
            await engine.request(FARTHER, late, timeout=0.01)

        with pytest.raises(DuplicateReply):
            engine.reply(answered.correlation_id, 2)
        with pytest.raises(LateReply):
            engine.reply(late.correlation_id, 2)
        with pytest.raises(UnknownReply):
            engine.reply(Envelope(3).correlation_id, 2)

    run(story())


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_makes_no_sense_is_a_mistake(timeout: float) -> None:
    engine = make_engine(returning(Reply(1)))

    with pytest.raises(InvalidParameter, match="timeout"):
        run(engine.request(ASK, Envelope(1), timeout))
    assert waiting(engine) == 0


def test_a_request_of_the_same_correlation_needs_the_first_to_end() -> None:
    async def story() -> None:
        engine = make_engine(hanging)
        envelope = Envelope(1)
        asking = asyncio.create_task(engine.request(ASK, envelope))
        await until(lambda: waiting(engine))

        with pytest.raises(InvalidParameter, match="still open"):
            await engine.request(ASK, envelope)

        asking.cancel()

    run(story())


def test_nothing_is_asked_before_the_freeze() -> None:
    with pytest.raises(InvalidState):
        run(DispatchEngine().request(ASK, Envelope(1)))


# Cancellation and the end


def test_a_request_that_is_cancelled_cancels_its_message_and_leaves_no_entry() -> None:
    async def story() -> None:
        seen: list[str] = []

        async def handle(envelope: Envelope[Any]) -> None:
            seen.append("begun")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        engine = make_engine(handle)
        asking = asyncio.create_task(engine.request(ASK, Envelope(1)))
        await until(lambda: seen)
        asking.cancel()
        await until(lambda: len(seen) == 2)

        assert asking.cancelled()
        assert seen == ["begun", "cancelled"]
        assert waiting(engine) == 0

    run(story())


def test_a_message_that_is_cancelled_by_others_ends_its_request() -> None:
    async def story() -> None:
        engine = make_engine(hanging)
        asking = asyncio.create_task(engine.request(ASK, Envelope(1)))
        await until(lambda: engine._requester._running)

        for sending in engine._requester._running:
            sending.cancel()
        await asyncio.wait([asking], timeout=5)

        assert asking.cancelled()
        assert waiting(engine) == 0

    run(story())


def test_a_stop_ends_all_requests_and_what_they_sent() -> None:
    async def story() -> None:
        ended: list[str] = []

        async def handle(envelope: Envelope[Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("message")

        engine = make_engine(handle, returning(None))
        asking = [asyncio.create_task(engine.request(topic, Envelope(1))) for topic in (ASK, FARTHER)]
        await until(lambda: waiting(engine) == 2)
        await engine.stop(0.01)

        for one in asking:
            with pytest.raises(ChannelClosed):
                await one
        await until(lambda: not engine._requester._running)
        assert ended == ["message"]

    run(story())


def test_a_stop_lets_requests_end_that_end_in_time() -> None:
    async def story() -> Reply:
        gate = asyncio.Event()

        async def handle(envelope: Envelope[Any]) -> Reply:
            await gate.wait()
            return Reply("just in time")

        engine = make_engine(handle)
        asking = asyncio.create_task(engine.request(ASK, Envelope(1)))
        await until(lambda: waiting(engine))
        stopping = asyncio.create_task(engine.stop(5))
        await asyncio.sleep(0)
        gate.set()
        await stopping
        return await asking

    assert run(story()) == Reply("just in time")


def test_after_a_stop_nobody_is_asked_and_after_a_start_again() -> None:
    async def story() -> Reply:
        engine = make_engine(returning(Reply(1)))
        await engine.stop()
        with pytest.raises(ChannelClosed):
            await engine.request(ASK, Envelope(1))
        with pytest.raises(ChannelClosed):
            engine.reply(Envelope(1).correlation_id, 1)
        await engine.start()
        return await engine.request(ASK, Envelope(1))

    assert run(story()) == Reply(1)


def test_an_event_loop_that_ends_takes_its_requests_along() -> None:
    engine = make_engine(hanging)

    async def story() -> None:
        tasks.append(asyncio.create_task(engine.request(ASK, Envelope(1))))
        await until(lambda: waiting(engine))

    tasks: list[asyncio.Task[Reply]] = []
    asyncio.run(story())

    assert tasks[0].cancelled()
    assert waiting(engine) == 0
    assert not engine._requester._running
