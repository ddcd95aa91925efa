"""`execute`: a command has one dispatcher, a reply, and two events that tell of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raydispatch.bus.announcements import COMMAND_RESULT, COMMAND_STARTED, CommandResult, CommandStarted
from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.filters import not_types
from raydispatch.bus.pubsub import Subscription
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Reply
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BackpressureSettings, BackpressureStrategy, EngineSettings, RetrySettings

T = TypeVar("T")

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND
TOPIC = "dev.stock.commands.take"


def make_engine(handler: Any, **settings: Any) -> DispatchEngine:
    engine = DispatchEngine(settings=EngineSettings(**settings))
    engine.dispatcher("stock", topics=TOPIC, category=COMMAND, retry=RetrySettings(tries=1))(handler)
    engine.freeze()
    return engine


async def taking(envelope: Envelope[Any]) -> Reply:
    return Reply(f"took {envelope.payload}")


async def failing(envelope: Envelope[Any]) -> None:
    raise OSError("password=hunter2")


async def hanging(envelope: Envelope[Any]) -> None:
    await asyncio.Event().wait()


async def heard(listener: Subscription) -> list[Any]:
    listener.unsubscribe()
    return [envelope.payload async for envelope in listener]


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


def test_a_command_comes_back_with_its_handlers_reply() -> None:
    result = run(make_engine(taking).execute(TOPIC, Envelope("tea")))

    assert (result.status, result.reply, result.dispatcher_id) == (DispatchStatus.SUCCESS, Reply("took tea"), "stock")


def test_a_command_has_one_dispatcher_the_first_in_order() -> None:
    seen: list[str] = []

    def noting(name: str) -> Any:
        async def handle(envelope: Envelope[Any]) -> None:
            seen.append(name)

        return handle

    engine = DispatchEngine()
    engine.dispatcher("glob", topics="dev.**", category=COMMAND)(noting("glob"))
    engine.dispatcher("exact", topics=TOPIC, category=COMMAND)(noting("exact"))
    engine.freeze()
    result = run(engine.execute(TOPIC, Envelope("tea")))

    assert seen == ["exact"]
    assert len(result.outcomes) == 1


@pytest.mark.parametrize("topic", ["dev.stock.events.taken", "dev.stock.intents.take"])
def test_what_is_not_a_command_is_not_executed(topic: str) -> None:
    seen: list[str] = []

    async def handle(envelope: Envelope[Any]) -> None:
        seen.append(envelope.topic)

    async def story() -> tuple[DispatchResult, list[Any]]:
        engine = DispatchEngine()
        category = MessageCategory.from_topic(topic)
        assert category is not None
        engine.dispatcher("a", topics=topic, category=category)(handle)
        engine.freeze()
        listener = engine.subscribe("raydispatch.**")
        return await engine.execute(topic, Envelope(1)), await heard(listener)

    result, news = run(story())

    assert (result.status, result.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.NOT_A_COMMAND)
    assert (seen, news) == ([], [])


@pytest.mark.parametrize(
    ("topic", "status"),
    [
        ("dev.stock.commands.unknown", DispatchStatus.NO_DISPATCHER),
        ("dev.stock.nothing", DispatchStatus.INVALID_MESSAGE),
    ],
)
def test_a_command_that_reaches_nobody_is_an_outcome(topic: str, status: DispatchStatus) -> None:
    assert run(make_engine(taking).execute(topic, Envelope(1))).status is status


def test_mistakes_of_the_caller_are_raised() -> None:
    nothing: Any = None

    with pytest.raises(InvalidParameter):
        run(make_engine(taking).execute("", Envelope(1)))
    with pytest.raises(InvalidParameter):
        run(make_engine(taking).execute(TOPIC, nothing))
    with pytest.raises(InvalidState):
        run(DispatchEngine().execute(TOPIC, Envelope(1)))


# Announcements


@pytest.mark.parametrize(
    ("handler", "status", "words"),
    [
        (taking, DispatchStatus.SUCCESS, None),
        (failing, DispatchStatus.DISPATCHER_ERROR, "stock: OSError: password=[REDACTED]"),
    ],
)
def test_a_command_is_announced_before_and_after(handler: Any, status: DispatchStatus, words: str | None) -> None:
    async def story() -> tuple[DispatchResult, list[Any]]:
        engine = make_engine(handler)
        listener = engine.subscribe("raydispatch.command.events.*")
        return await engine.execute(TOPIC, envelope), await heard(listener)

    envelope = Envelope("tea", message_type="Take")
    result, (started, ended) = run(story())

    assert started == CommandStarted(envelope.message_id, TOPIC, "Take")
    assert ended == CommandResult(envelope.message_id, TOPIC, "Take", status, result.duration_ms, words)


def test_announcements_are_follow_ups_of_the_command() -> None:
    async def story() -> list[Envelope[Any]]:
        engine = make_engine(taking)
        listener = engine.subscribe("raydispatch.**")
        await engine.execute(TOPIC, envelope)
        listener.unsubscribe()
        return [news async for news in listener]

    envelope = Envelope("tea", key="customer-1")
    news = run(story())

    assert [(one.topic, one.message_type) for one in news] == [
        (COMMAND_STARTED, "CommandStarted"),
        (COMMAND_RESULT, "CommandResult"),
    ]
    for one in news:
        assert (one.correlation_id, one.causation_id) == (envelope.correlation_id, envelope.message_id)
        assert one.key == "customer-1"


def test_a_command_that_is_cancelled_is_announced_as_ended() -> None:
    async def story() -> tuple[asyncio.Task[DispatchResult], list[Any]]:
        engine = make_engine(hanging)
        listener = engine.subscribe("raydispatch.**")
        executing = asyncio.create_task(engine.execute(TOPIC, Envelope("tea")))
        await until(lambda: listener.pending)

        executing.cancel()
        await asyncio.wait([executing])

        return executing, await heard(listener)

    executing, (_, ended) = run(story())

    assert executing.cancelled()
    assert (ended.status, ended.error_message) == (DispatchStatus.DISPATCHER_ERROR, "CancelledError")


def test_dispatchers_hear_of_commands_as_subscribers_do() -> None:
    async def story() -> list[str]:
        seen: list[str] = []
        engine = DispatchEngine()
        engine.dispatcher("stock", topics=TOPIC, category=COMMAND)(taking)

        @engine.dispatcher("audit", topics="raydispatch.**", category=EVENT)
        async def audit(envelope: Envelope[Any]) -> None:
            seen.append(envelope.message_type)

        engine.freeze()
        await engine.execute(TOPIC, Envelope("tea"))
        await engine.drain()
        return seen

    assert run(story()) == ["CommandStarted", "CommandResult"]


def test_if_nobody_listens_nothing_is_announced() -> None:
    engine = make_engine(taking)

    run(engine.execute(TOPIC, Envelope("tea")))

    assert engine.get_structured_metrics().total_dispatches == 1


def test_filters_hold_back_announcements_and_not_commands() -> None:
    async def story() -> tuple[DispatchResult, list[Any]]:
        engine = make_engine(taking)
        engine.add_filter(not_types("CommandStarted", "str"))
        listener = engine.subscribe("raydispatch.**")
        return await engine.execute(TOPIC, Envelope("tea")), await heard(listener)

    result, news = run(story())

    assert result.is_successful()
    assert [type(one) for one in news] == [CommandResult]


def full_engine(gate: asyncio.Event) -> DispatchEngine:
    """Its queue has one place, and WAIT is its strategy; everything published waits at the gate."""
    engine = DispatchEngine(
        settings=EngineSettings(
            backpressure=BackpressureSettings(strategy=BackpressureStrategy.WAIT, capacity=1),
            batch_size=1,
            batch_wait_seconds=0,
            max_concurrent_deliveries=1,
            outbox_capacity=3,
        )
    )

    async def wait(envelope: Envelope[Any]) -> None:
        await gate.wait()

    engine.dispatcher("audit", topics=["dev.order.events", "raydispatch.**"], category=EVENT)(wait)
    engine.dispatcher("stock", topics=TOPIC, category=COMMAND)(taking)
    engine.dispatcher("slow", topics="dev.slow.commands", category=COMMAND)(hanging)
    engine.freeze()
    return engine


def test_a_full_queue_holds_up_no_command() -> None:
    async def story() -> list[DispatchResult]:
        gate = asyncio.Event()
        engine = full_engine(gate)
        for _ in range(3):
            await engine.publish("dev.order.events", Envelope(1))

        results = [await engine.execute(TOPIC, Envelope("tea")) for _ in range(4)]
        gate.set()
        await engine.drain()

        # Of the eight announcements, the outbox has room for three.
        assert engine.get_structured_metrics().statuses[DispatchStatus.REJECTED] == 8 - 3
        return results

    assert all(result.is_successful() for result in run(story()))


def test_a_full_queue_does_not_keep_a_command_from_being_cancelled() -> None:
    async def story() -> bool:
        engine = full_engine(asyncio.Event())
        for _ in range(3):
            await engine.publish("dev.order.events", Envelope(1))
        executing = asyncio.create_task(engine.execute("dev.slow.commands", Envelope("tea")))
        await asyncio.sleep(0)

        executing.cancel()
        await asyncio.wait([executing], timeout=5)

        return executing.cancelled()

    assert run(story())


def test_commands_cut_off_by_the_end_of_the_loop_are_announced_or_refused() -> None:
    ended: list[DispatchResult] = []
    engine = DispatchEngine(on_result=ended.append)
    engine.dispatcher("stock", topics=TOPIC, category=COMMAND)(hanging)

    @engine.dispatcher("audit", topics="raydispatch.**", category=EVENT)
    async def audit(envelope: Envelope[Any]) -> None: ...

    engine.freeze()

    async def story() -> None:
        running = [asyncio.create_task(engine.execute(TOPIC, Envelope(number))) for number in range(20)]
        await until(lambda: len(ended) == len(running))

    asyncio.run(story())

    assert engine.get_structured_metrics().total_dispatches == 40
