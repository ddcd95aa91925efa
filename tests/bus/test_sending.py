import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raydispatch.bus.freezing import checked_table
from raydispatch.bus.sending import Fault, Sender, SenderParts
from raydispatch.delivery.dead_letters import DeadLetters
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import Dispatcher, DispatcherSpec
from raydispatch.dispatch.metrics import MetricsRecorder
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Reply
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.settings import BreakerSettings, RetrySettings

T = TypeVar("T")

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND
TOPIC = "dev.order.events.v1"
LOG = logging.getLogger("raydispatch")
ONCE = RetrySettings(tries=1)


class Post:
    """A sender for handlers a, b, c, …, all of one topic, and what it tells others."""

    def __init__(self, *handlers: Any, priorities: tuple[int, ...] = (), routes: int = 1, **options: Any) -> None:
        specs = [
            DispatcherSpec(name, handler, EVENT, **{"retry": ONCE, **options})
            for name, handler in zip("abcdef", handlers, strict=False)
        ]
        chosen = priorities or (0,) * len(specs)
        paths = [
            DispatchRoute(
                route_id=f"{spec.dispatcher_id}-{number}",
                topic_pattern=TOPIC if number == 0 else "dev.**",
                message_category=EVENT,
                dispatcher_id=spec.dispatcher_id,
                priority=priority,
            )
            for spec, priority in zip(specs, chosen, strict=True)
            for number in range(routes)
        ]
        self.replies: list[tuple[Envelope[Any], Reply]] = []
        self.metrics = MetricsRecorder(most_topics=10)
        self.dead_letters = DeadLetters(10)
        self.dispatchers = {spec.dispatcher_id: Dispatcher(spec) for spec in specs}
        parts = SenderParts(
            self.metrics, self.dead_letters, LOG, 10, lambda envelope, reply: self.replies.append((envelope, reply))
        )
        self.sender = Sender(checked_table(paths, specs, cache_entries=10, log=LOG), self.dispatchers, parts)

    async def send(self, payload: object = "hello") -> DispatchResult:
        return await self.sender.send(TOPIC, Envelope(payload))


def returning(value: Any) -> Any:
    async def handle(envelope: Envelope[Any]) -> Any:
        return value

    return handle


async def failing(envelope: Envelope[Any]) -> None:
    raise OSError("down")


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


# Results


def test_a_dispatcher_that_several_routes_lead_to_runs_once() -> None:
    seen: list[Any] = []

    async def handle(envelope: Envelope[Any]) -> None:
        seen.append(envelope.payload)

    result = run(Post(handle, handle, routes=2).send())

    assert seen == ["hello", "hello"]
    assert [outcome.dispatcher_id for outcome in result.outcomes] == ["a", "b"]


@pytest.mark.parametrize("priorities", [(0, 0), (1, 0)])
def test_a_failure_keeps_nobody_else_from_running(priorities: tuple[int, ...]) -> None:
    post = Post(failing, returning("next.events"), priorities=priorities)

    result = run(post.send())

    assert [outcome.status for outcome in result.outcomes] == [DispatchStatus.DISPATCHER_ERROR, DispatchStatus.SUCCESS]
    assert (result.status, result.outputs) == (DispatchStatus.DISPATCHER_ERROR, ("next.events",))
    assert len(post.dead_letters) == 1


def test_a_refusal_is_counted_and_logged_like_any_other_end(caplog: pytest.LogCaptureFixture) -> None:
    post = Post(failing)
    envelope = Envelope("hello")

    result = post.sender.refuse(TOPIC, envelope, Fault(DispatchStatus.REJECTED, ErrorCode.DROPPED, "no room"))

    assert (result.status, result.error_code, result.error_message) == (
        DispatchStatus.REJECTED, ErrorCode.DROPPED, "no room",
    )  # fmt: skip
    assert (result.correlation_id, result.outcomes) == (envelope.correlation_id, ())
    assert post.metrics.snapshot().statuses == {DispatchStatus.REJECTED: 1}
    assert [(record.message, record.levelno) for record in caplog.records] == [("message rejected", logging.WARNING)]


@pytest.mark.parametrize(
    ("topic", "payload", "code"),
    [
        ("dev.order", "x", ErrorCode.INVALID_TOPIC),
        (TOPIC, "x" * 11, ErrorCode.PAYLOAD_TOO_LARGE),
        (TOPIC, b"x" * 10, None),
        (TOPIC, {"any": "object " * 100}, None),
    ],
)
def test_what_is_wrong_with_a_message_itself(topic: str, payload: object, code: ErrorCode | None) -> None:
    fault = Post(failing).sender.fault(topic, MessageCategory.from_topic(topic), Envelope(payload))

    assert (fault and fault.code) == code


# Replies


def test_who_sends_gets_the_reply_with_the_result_and_nobody_else_does() -> None:
    post = Post(returning(None), returning(Reply(7)), returning(Reply(8)))

    result = run(post.send())

    assert result.reply == Reply(7)
    assert post.replies == []


def test_what_is_delivered_hands_every_reply_to_the_one_who_asked() -> None:
    post = Post(returning(None), returning(Reply(7)), returning(Reply(8)))
    envelope = Envelope("hello")

    result = run(post.sender.deliver(TOPIC, envelope))

    assert result.is_successful()
    assert [reply for _, reply in post.replies] == [Reply(7), Reply(8)]
    assert {asked.correlation_id for asked, _ in post.replies} == {envelope.correlation_id}


# Cancellation


@pytest.mark.parametrize("count", [1, 3])
def test_a_sender_that_is_cancelled_cancels_all_handlers(count: int) -> None:
    begun: list[int] = []
    cancelled: list[int] = []

    async def hanging(envelope: Envelope[Any]) -> None:
        begun.append(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def story() -> None:
        post = Post(*[hanging] * count)
        sending = asyncio.create_task(post.send())
        await until(lambda: len(begun) == count)

        sending.cancel()
        await asyncio.wait([sending])

        assert sending.cancelled()
        assert len(cancelled) == count
        for dispatcher in post.dispatchers.values():
            assert [endpoint.in_flight for endpoint in dispatcher.endpoints.all()] == [0]

    run(story())


def test_between_two_priorities_a_sender_that_is_cancelled_starts_no_more() -> None:
    begun: list[str] = []

    def hanging(name: str) -> Any:
        async def handle(envelope: Envelope[Any]) -> None:
            begun.append(name)
            await asyncio.Event().wait()

        return handle

    async def story() -> None:
        sending = asyncio.create_task(Post(hanging("high"), hanging("low"), priorities=(1, 0)).send())
        await until(lambda: begun)

        sending.cancel()
        await asyncio.wait([sending])

        assert begun == ["high"]

    run(story())


@pytest.mark.parametrize("count", [1, 2])
def test_a_handler_that_waits_for_something_cancelled_has_failed_and_nobody_was_cancelled(count: int) -> None:
    async def careless(envelope: Envelope[Any]) -> None:
        lost = asyncio.ensure_future(asyncio.Event().wait())
        lost.cancel()
        await lost

    async def story() -> tuple[DispatchResult, Post]:
        post = Post(*[careless] * count, breaker=BreakerSettings(failure_threshold=1))
        return await post.send(), post

    result, post = run(story())

    assert (result.status, result.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION)
    assert [outcome.error_type for outcome in result.outcomes] == ["CancelledError"] * count
    breaker = post.dispatchers["a"].breaker
    assert breaker is not None
    assert breaker.state is CircuitState.OPEN
