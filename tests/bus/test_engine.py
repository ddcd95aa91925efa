import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Reply
from raydispatch.dispatch.registry import DispatcherRegistry
from raydispatch.errors import (
    DuplicateRegistration,
    ErrorCode,
    InvalidParameter,
    InvalidState,
    InvalidTable,
    NotRegistered,
)
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.settings import BreakerSettings, EngineSettings, RetrySettings

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND
TOPIC = "dev.order.events.v1"
ONCE = RetrySettings(tries=1)


class FakeClock:
    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def quiet(envelope: Envelope[Any]) -> None: ...


async def failing(envelope: Envelope[Any]) -> None:
    raise OSError("password=hunter2")


def make_route(
    route_id: str, dispatcher_id: str, pattern: str = TOPIC, category: MessageCategory = EVENT, priority: int = 0
) -> DispatchRoute:
    return DispatchRoute(
        route_id=route_id,
        topic_pattern=pattern,
        message_category=category,
        dispatcher_id=dispatcher_id,
        priority=priority,
    )


def make_engine(*handlers: Any, settings: EngineSettings | None = None, **options: Any) -> DispatchEngine:
    """A frozen engine whose dispatchers a, b, c, … all take the one topic."""
    engine = DispatchEngine("test", settings=settings, clock=FakeClock())
    for name, handler in zip("abcdefgh", handlers, strict=False):
        engine.dispatcher(name, topics=TOPIC, category=EVENT, **options)(handler)
    engine.freeze()
    return engine


def send(engine: DispatchEngine, payload: object = "hello", topic: str = TOPIC) -> DispatchResult:
    return asyncio.run(engine.dispatch(topic, Envelope(payload)))


# Registering and freezing


def test_nothing_is_registered_after_the_freeze() -> None:
    engine = make_engine(quiet)

    with pytest.raises(InvalidState, match="'test' is frozen"):
        engine.register_route(make_route("late", "a"))
    with pytest.raises(InvalidState, match="'test' is frozen"):
        engine.register_dispatcher("late", quiet, EVENT)


def test_nothing_is_dispatched_before_the_freeze() -> None:
    with pytest.raises(InvalidState, match="freeze"):
        send(DispatchEngine())


def test_the_table_is_there_only_after_the_freeze() -> None:
    with pytest.raises(InvalidState):
        _ = DispatchEngine().table


@pytest.mark.parametrize("topic", ["", "  ", None, 7])
def test_a_topic_that_is_none_is_a_mistake_of_the_caller(topic: Any) -> None:
    with pytest.raises(InvalidParameter, match="topic"):
        send(make_engine(quiet), topic=topic)


@pytest.mark.parametrize("envelope", [None, {"order": 7}, "text"])
def test_only_envelopes_are_dispatched(envelope: Any) -> None:
    with pytest.raises(InvalidParameter, match="Envelope"):
        asyncio.run(make_engine(quiet).dispatch(TOPIC, envelope))


def test_only_routes_are_registered_as_routes() -> None:
    wrong: Any = None

    with pytest.raises(InvalidParameter, match="DispatchRoute"):
        DispatchEngine().register_route(wrong)


def test_an_id_is_registered_once() -> None:
    engine = DispatchEngine()
    engine.register_dispatcher("a", quiet, EVENT)
    engine.register_route(make_route("r", "a"))

    with pytest.raises(DuplicateRegistration):
        engine.register_dispatcher("a", quiet, EVENT)
    with pytest.raises(DuplicateRegistration):
        engine.register_route(make_route("r", "a"))


def test_all_missing_dispatchers_are_named_at_once() -> None:
    engine = DispatchEngine()
    engine.register_route(make_route("one", "nobody"))
    engine.register_route(make_route("two", "no-one"))

    with pytest.raises(InvalidTable) as caught:
        engine.freeze()

    assert caught.value.error_code is ErrorCode.ITEM_NOT_REGISTERED
    assert len(caught.value.faults) == 2
    assert "'nobody'" in str(caught.value)
    assert "'no-one'" in str(caught.value)
    assert not engine.is_frozen


def test_after_a_failed_freeze_what_is_missing_can_be_registered() -> None:
    engine = DispatchEngine()
    engine.register_route(make_route("one", "a"))
    with pytest.raises(InvalidTable):
        engine.freeze()

    engine.register_dispatcher("a", quiet, EVENT)
    engine.freeze()

    assert send(engine).is_successful()


def test_a_route_and_its_dispatcher_are_of_one_category() -> None:
    engine = DispatchEngine()
    engine.register_dispatcher("a", quiet, COMMAND)
    engine.register_route(make_route("one", "a"))

    with pytest.raises(InvalidTable, match="is for events, its dispatcher 'a' for commands") as caught:
        engine.freeze()

    assert caught.value.error_code is ErrorCode.INVALID_PARAMETER


def overlapping_engine() -> DispatchEngine:
    engine = DispatchEngine()
    engine.dispatcher("a", topics="dev.*.commands", category=COMMAND)(quiet)
    engine.dispatcher("b", topics="*.order.commands", category=COMMAND)(quiet)
    return engine


def test_a_strict_freeze_refuses_commands_for_two(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidTable):
        overlapping_engine().freeze(strict=True)

    with caplog.at_level(logging.WARNING, logger="raydispatch"):
        overlapping_engine().freeze()
    assert [record.message for record in caplog.records] == ["command routes overlap"]


def test_a_second_freeze_gives_the_same_table() -> None:
    engine = make_engine(quiet)

    assert engine.freeze() is engine.freeze() is engine.table


def test_counts_and_repr_tell_what_is_registered() -> None:
    engine = DispatchEngine("orders")
    engine.dispatcher("a", topics=["x.events", "y.events"], category=EVENT)(quiet)
    before = repr(engine)
    engine.freeze()

    assert (engine.route_count, engine.dispatcher_count, engine.is_frozen) == (2, 1, True)
    assert before == "<DispatchEngine 'orders': 2 routes, 1 dispatchers, open for registration>"
    assert f"frozen, table {engine.table.version}" in repr(engine)


def test_the_decorator_gives_the_handler_back() -> None:
    assert DispatchEngine().dispatcher("a", topics=TOPIC, category=EVENT)(quiet) is quiet


# Messages that reach nobody


def test_a_message_that_nobody_takes_is_no_dispatcher() -> None:
    result = send(make_engine(quiet), topic="dev.other.events.v1")

    assert (result.status, result.error_code) == (DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER)
    assert result.outcomes == ()


@pytest.mark.parametrize("topic", ["no.category.here", "a..events", "x" * 501, "a.events\n"])
def test_a_topic_without_a_category_is_invalid(topic: str) -> None:
    result = send(make_engine(quiet), topic=topic)

    assert (result.status, result.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC)
    assert result.message_category is None


@pytest.mark.parametrize("payload", ["x" * 11, "ä" * 6, b"x" * 11, bytearray(11), memoryview(bytes(11))])
def test_a_payload_over_the_limit_is_invalid(payload: object) -> None:
    engine = make_engine(quiet, settings=EngineSettings(max_payload_bytes=10))

    result = send(engine, payload)

    assert (result.status, result.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_TOO_LARGE)


def test_a_payload_at_the_limit_is_taken() -> None:
    assert send(make_engine(quiet, settings=EngineSettings(max_payload_bytes=10)), "x" * 10).is_successful()


# Fan-out


def test_outputs_stand_in_order_of_selection_whoever_is_first() -> None:
    async def slow(envelope: Envelope[Any]) -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return ["a1", "a2"]

    async def fast(envelope: Envelope[Any]) -> str:
        return "b1"

    result = send(make_engine(slow, fast, quiet))

    assert result.outputs == ("a1", "a2", "b1")
    assert [outcome.dispatcher_id for outcome in result.outcomes] == ["a", "b", "c"]
    assert (result.dispatcher_id, result.route_id, result.output_count) == ("a", "a", 3)


def test_one_failure_does_not_stop_the_others_and_the_worst_status_counts() -> None:
    done: list[str] = []

    async def works(envelope: Envelope[Any]) -> str:
        done.append("b")
        return "b1"

    result = send(make_engine(failing, works, retry=ONCE))

    assert done == ["b"]
    assert (result.status, result.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION)
    assert result.outputs == ("b1",)
    assert result.error_message == "a: OSError: password=[REDACTED]"


def test_higher_priorities_finish_before_lower_ones_start() -> None:
    seen: list[str] = []

    def tracing(name: str) -> Any:
        async def handle(envelope: Envelope[Any]) -> None:
            seen.append(f"{name}+")
            await asyncio.sleep(0)
            seen.append(f"{name}-")

        return handle

    engine = DispatchEngine()
    for name, priority in [("low", -1), ("high-1", 5), ("high-2", 5), ("middle", 0)]:
        engine.dispatcher(name, topics=TOPIC, category=EVENT, priority=priority)(tracing(name))
    engine.freeze()
    send(engine)

    assert seen == ["high-1+", "high-2+", "high-1-", "high-2-", "middle+", "middle-", "low+", "low-"]


def test_the_handler_sees_the_topic_and_the_result_the_ids() -> None:
    seen: list[Envelope[Any]] = []

    async def handle(envelope: Envelope[Any]) -> None:
        seen.append(envelope)

    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    envelope = Envelope("hello", traceparent=traceparent)
    engine = make_engine(handle)
    result = asyncio.run(engine.dispatch(TOPIC, envelope))

    assert seen[0].topic == result.topic == TOPIC
    assert result.correlation_id == envelope.correlation_id
    assert (result.trace_id, result.span_id) == ("a" * 32, "b" * 16)
    assert result.table_version == engine.table.version


# Failures, dead letters, circuits


def test_after_the_last_try_there_is_one_dead_letter() -> None:
    engine = make_engine(failing, retry=RetrySettings(tries=3))

    result = send(engine, "the order")

    (letter,) = engine.dead_letters.list(dispatcher_id="a", error_type="OSError")
    assert (letter.topic, letter.envelope.payload) == (TOPIC, "the order")
    assert letter.outcome == result.outcomes[0]
    assert letter.outcome.attempts == 3
    assert letter.table_version == engine.table.version


def test_a_refusal_by_an_open_circuit_makes_no_dead_letter() -> None:
    engine = make_engine(failing, retry=ONCE, breaker=BreakerSettings(failure_threshold=1))
    send(engine)

    result = send(engine)

    assert (result.status, result.outcomes[0].attempts) == (DispatchStatus.CIRCUIT_OPEN, 0)
    assert engine.circuit_state("a") is CircuitState.OPEN
    assert len(engine.dead_letters) == 1


def test_dead_letters_are_bounded() -> None:
    engine = make_engine(failing, retry=ONCE, breaker=None, settings=EngineSettings(dead_letters=3))

    for number in range(5):
        send(engine, number)

    assert [letter.envelope.payload for letter in engine.dead_letters.list()] == [2, 3, 4]
    assert engine.dead_letters.forgotten == 2


def test_a_payload_that_does_not_fit_is_a_dead_letter() -> None:
    async def counts(envelope: Envelope[int]) -> None: ...

    engine = make_engine(counts)
    result = send(engine, {"token": "hunter2"})

    assert (result.status, result.error_code) == (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID)
    assert "hunter2" not in (result.error_message or "")
    assert len(engine.dead_letters) == 1


def test_the_circuit_of_an_unknown_dispatcher_is_a_mistake() -> None:
    with pytest.raises(NotRegistered):
        make_engine(quiet).circuit_state("nobody")


def test_without_a_breaker_the_circuit_is_closed() -> None:
    assert make_engine(quiet, breaker=None).circuit_state("a") is CircuitState.CLOSED


# Own parts


class ListRegistry:
    """The least that can stand behind an engine."""

    def __init__(self) -> None:
        self.kept_routes: list[DispatchRoute] = []
        self.kept_specs: list[DispatcherSpec] = []

    def add_route(self, route: DispatchRoute) -> None:
        self.kept_routes.append(route)

    def add_dispatcher(self, spec: DispatcherSpec) -> None:
        self.kept_specs.append(spec)

    def routes(self) -> Sequence[DispatchRoute]:
        return self.kept_routes

    def dispatchers(self) -> Sequence[DispatcherSpec]:
        return self.kept_specs


def test_a_registry_of_ones_own_stands_behind_the_engine() -> None:
    registry = ListRegistry()
    engine = DispatchEngine(registry=registry)
    engine.dispatcher("a", topics=TOPIC, category=EVENT)(quiet)
    engine.freeze()

    assert send(engine).is_successful()
    assert [spec.dispatcher_id for spec in registry.kept_specs] == ["a"]


class OrderDispatcher:
    dispatcher_id = "orders"
    category = EVENT
    message_types: set[str] | None = {"OrderPlaced"}  # noqa: RUF012
    node_kind = "effect"

    async def handle(self, envelope: Envelope[Any]) -> str:
        return "dev.invoice.events.v1"


def test_a_protocol_dispatcher_gets_its_types_only() -> None:
    registry = DispatcherRegistry()
    registry.register_dispatcher(OrderDispatcher())
    engine = DispatchEngine(registry=registry)
    engine.register_route(make_route("r", "orders"))
    engine.freeze()

    taken = asyncio.run(engine.dispatch(TOPIC, Envelope({}, message_type="OrderPlaced")))
    other = asyncio.run(engine.dispatch(TOPIC, Envelope({}, message_type="OrderLost")))

    assert taken.outputs == ("dev.invoice.events.v1",)
    assert other.status is DispatchStatus.NO_DISPATCHER
    assert registry.dispatchers()[0].node_kind == "effect"


def test_handlers_are_started_and_stopped_with_the_engine() -> None:
    seen: list[str] = []

    class Connected:
        async def start(self) -> None:
            seen.append("start")

        def handle(self, envelope: Envelope[Any]) -> None:
            seen.append("handle")

        def stop(self) -> None:
            seen.append("stop")

    engine = DispatchEngine()
    engine.dispatcher("a", topics=TOPIC, category=EVENT)(Connected)

    async def live() -> None:
        async with engine:
            await engine.dispatch(TOPIC, Envelope("hello"))

    asyncio.run(live())

    assert seen == ["start", "handle", "stop"]


def test_a_failing_stop_does_not_keep_the_others_from_stopping(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []

    class Bad:
        def handle(self, envelope: Envelope[Any]) -> None: ...

        def stop(self) -> None:
            raise OSError("no")

    class Good:
        def handle(self, envelope: Envelope[Any]) -> None: ...

        def stop(self) -> None:
            stopped.append("good")

    engine = make_engine(Bad, Good)

    async def live() -> None:
        async with engine:
            pass

    asyncio.run(live())

    assert stopped == ["good"]
    assert "stop failed" in caplog.messages


def test_a_failing_stop_tells_no_secret_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def handle(self, envelope: Envelope[Any]) -> None: ...

        def stop(self) -> None:
            raise OSError("password=" + "hunter" + "2")

    async def live() -> None:
        async with make_engine(Bad):
            pass

    asyncio.run(live())

    assert "hunter2" not in caplog.text + str([record.__dict__ for record in caplog.records])


# Logs


def test_a_dispatch_is_logged_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    envelope = Envelope("hello", message_type="Greeting")

    with caplog.at_level(logging.INFO, logger="raydispatch"):
        asyncio.run(make_engine(quiet).dispatch(TOPIC, envelope))

    started, completed = caplog.records
    assert [(r.message, r.levelno) for r in (started, completed)] == [
        ("dispatch started", logging.INFO),
        ("dispatch completed", logging.INFO),
    ]
    for record in (started, completed):
        assert record.__dict__["topic"] == TOPIC
        assert record.__dict__["category"] == "event"
        assert record.__dict__["message_type"] == "Greeting"
        assert record.__dict__["correlation_id"] == str(envelope.correlation_id)
        assert record.__dict__["dispatcher_count"] == 1
    assert completed.__dict__["status"] == "success"
    assert completed.__dict__["dispatcher_id"] == ["a"]


@pytest.mark.parametrize(
    ("topic", "message", "level"),
    [
        ("dev.other.events", "no dispatcher", logging.WARNING),
        ("nothing.here", "invalid message", logging.ERROR),
        (TOPIC, "dispatcher did not succeed", logging.ERROR),
    ],
)
def test_trouble_is_logged_at_its_level(caplog: pytest.LogCaptureFixture, topic: str, message: str, level: int) -> None:
    with caplog.at_level(logging.WARNING, logger="raydispatch"):
        send(make_engine(failing, retry=ONCE), topic=topic)

    assert [(record.message, record.levelno) for record in caplog.records] == [(message, level)]


def test_no_secret_stands_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="raydispatch"):
        send(make_engine(failing, quiet), {"password": "hunter2"})

    assert len(caplog.records) > 3
    assert "hunter2" not in caplog.text + str([record.__dict__ for record in caplog.records])


def test_a_logger_of_ones_own_gets_the_lines() -> None:
    lines: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record)

    logger = logging.Logger("mine", logging.INFO)
    logger.addHandler(Keeping())
    engine = DispatchEngine(logger=logger)
    engine.dispatcher("a", topics=TOPIC, category=EVENT, retry=ONCE)(failing)
    engine.freeze()
    send(engine)

    assert [line.getMessage() for line in lines] == [
        "dispatch started",
        "dispatcher did not succeed",
        "dispatch completed",
    ]


# Metrics


def test_metrics_add_up() -> None:
    engine = make_engine(quiet, failing, retry=ONCE, breaker=None)

    for topic in [TOPIC, TOPIC, "dev.other.events", "nothing.here"]:
        send(engine, topic=topic)

    metrics = engine.get_structured_metrics()
    assert metrics.total_dispatches == metrics.latency.count == metrics.routing.count == 4
    assert metrics.statuses == {
        DispatchStatus.DISPATCHER_ERROR: 2,
        DispatchStatus.NO_DISPATCHER: 1,
        DispatchStatus.INVALID_MESSAGE: 1,
    }
    assert sum(metrics.latency_histogram.values()) == 4
    assert metrics.category_metrics == {EVENT: 3}
    assert metrics.dispatcher_metrics["a"].success_count == 2
    assert metrics.dispatcher_metrics["b"].error_count == 2
    assert engine.get_dispatcher_metrics("a") == metrics.dispatcher_metrics["a"]
    assert engine.get_dispatcher_metrics("nobody") is None


def test_ten_thousand_dispatches_from_several_threads_lose_no_count() -> None:
    async def sometimes(envelope: Envelope[Any]) -> None:
        await asyncio.sleep(0)
        if envelope.payload % 4 == 0:
            raise OSError("down")

    engine = make_engine(quiet, sometimes, retry=ONCE, breaker=None)

    async def many() -> None:
        await asyncio.gather(*(engine.dispatch(TOPIC, Envelope(number)) for number in range(2_000)))

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: asyncio.run(many()), range(5)))

    metrics = engine.get_structured_metrics()
    assert metrics.statuses == {DispatchStatus.SUCCESS: 7_500, DispatchStatus.DISPATCHER_ERROR: 2_500}
    assert metrics.total_dispatches == sum(metrics.latency_histogram.values()) == 10_000
    assert metrics.topic_metrics == {TOPIC: 10_000}
    assert metrics.dispatcher_metrics["a"].statuses == {DispatchStatus.SUCCESS: 10_000}
    assert metrics.dispatcher_metrics["b"].statuses == metrics.statuses
    assert metrics.dispatcher_metrics["b"].execution_count == 10_000
    assert len(engine.dead_letters) + engine.dead_letters.forgotten == 2_500


# Starting and stopping


class Connection:
    """A handler with a life, which it tells, and a gate for messages that say so."""

    def __init__(self) -> None:
        self.life: list[str] = []
        self.gate = asyncio.Event()

    async def start(self) -> None:
        self.life.append("start")

    async def handle(self, envelope: Envelope[Any]) -> Reply:
        self.life.append("begin")
        if envelope.payload == "hang":
            await self.gate.wait()
        self.life.append("end")
        return Reply(envelope.payload)

    async def stop(self) -> None:
        self.life.append("stop")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


def live_engine(*handlers: Any, **settings: Any) -> DispatchEngine:
    engine = DispatchEngine("live", settings=EngineSettings(**{"batch_wait_seconds": 0, **settings}))
    for name, handler in zip("abcdefgh", handlers, strict=False):
        engine.dispatcher(name, topics=TOPIC, category=EVENT, retry=ONCE)(handler)
    engine.freeze()
    return engine


def test_an_engine_can_be_stopped_and_started_again() -> None:
    async def story() -> None:
        connection = Connection()
        engine = live_engine(connection)

        for _ in range(2):
            async with engine, engine.subscribe("**") as listener:
                assert (await engine.dispatch(TOPIC, Envelope(1))).is_successful()
                assert (await engine.publish(TOPIC, Envelope(2))).subscribers == 1
                assert await engine.request(TOPIC, Envelope(3)) == Reply(3)
                await engine.drain()
                assert listener.pending == 1

        assert connection.life == ["start", *["begin", "end"] * 3, "stop"] * 2

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_start_that_fails_stops_what_was_started() -> None:
    class Broken(Connection):
        async def start(self) -> None:
            raise OSError("down")

    async def story() -> None:
        connection = Connection()

        with pytest.raises(OSError, match="down"):
            async with live_engine(connection, Broken):
                pass

        assert connection.life == ["start", "stop"]

    asyncio.run(story())


def test_a_start_that_is_cancelled_stops_what_was_started() -> None:
    class Slow(Connection):
        async def start(self) -> None:
            await asyncio.Event().wait()

    async def story() -> None:
        connection = Connection()
        starting = asyncio.create_task(live_engine(connection, Slow).start())
        await until(lambda: connection.life)

        starting.cancel()
        await asyncio.wait([starting])

        assert starting.cancelled()
        assert connection.life == ["start", "stop"]

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["dispatch", "publish", "request"])
def test_a_stop_lets_messages_end_before_it_stops_their_handler(verb: str) -> None:
    async def story() -> None:
        connection = Connection()
        engine = live_engine(connection)
        running = asyncio.create_task(getattr(engine, verb)(TOPIC, Envelope("hang")))
        await until(lambda: "begin" in connection.life)

        stopping = asyncio.create_task(engine.stop(5))
        for _ in range(5):
            await asyncio.sleep(0)
        connection.gate.set()
        await asyncio.gather(running, stopping)

        assert connection.life == ["start", "begin", "end", "stop"]

    asyncio.run(story())


def test_outputs_of_messages_that_run_while_it_stops_are_delivered() -> None:
    async def story() -> None:
        seen: list[str] = []
        gate = asyncio.Event()
        engine = DispatchEngine()

        @engine.dispatcher("a", topics=[TOPIC, "dev.next.events"], category=EVENT)
        async def handle(envelope: Envelope[Any]) -> str | None:
            seen.append(envelope.topic)
            await gate.wait()
            return "dev.next.events" if envelope.topic == TOPIC else None

        engine.freeze()
        running = asyncio.create_task(engine.dispatch(TOPIC, Envelope(1)))
        await until(lambda: seen)
        stopping = asyncio.create_task(engine.stop(5))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(running, stopping)

        assert seen == [TOPIC, "dev.next.events"]

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["dispatch", "publish", "request"])
def test_a_handler_that_hangs_holds_up_a_stop_no_longer_than_allowed(verb: str) -> None:
    async def story() -> None:
        connection = Connection()
        engine = live_engine(connection)
        running = asyncio.create_task(getattr(engine, verb)(TOPIC, Envelope("hang")))
        await until(lambda: "begin" in connection.life)

        await asyncio.wait_for(engine.stop(0.01), 5)

        assert connection.life == ["start", "begin", "stop"]
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())


def test_a_stop_that_is_cancelled_stops_at_once_and_for_all() -> None:
    async def story() -> None:
        connection = Connection()
        engine = live_engine(connection)
        ended: list[DispatchResult] = []
        engine._publishing()._on_result = ended.append
        await engine.publish(TOPIC, Envelope("hang"))
        await until(lambda: "begin" in connection.life)
        listener = engine.subscribe("**")

        stopping = asyncio.create_task(engine.stop(3_600))
        for _ in range(5):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        async with engine:
            again = await engine.publish(TOPIC, Envelope("hello"))
            await engine.drain()

        assert stopping.cancelled()
        assert [result.error_code for result in ended] == [ErrorCode.SHUT_DOWN, None]
        assert [envelope async for envelope in listener] == []
        assert again.status is DispatchStatus.ROUTED
        assert connection.life == ["start", "begin", "stop", "start", "begin", "end", "stop"]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_block_that_is_cancelled_leaves_a_stopped_engine() -> None:
    async def story() -> None:
        connection = Connection()

        async def serve() -> None:
            async with live_engine(connection):
                await asyncio.Event().wait()

        serving = asyncio.create_task(serve())
        await until(lambda: connection.life)
        await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])

        assert serving.cancelled()
        assert connection.life == ["start", "stop"]

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["dispatch", "publish"])
def test_a_handler_may_stop_the_engine_it_runs_in(verb: str) -> None:
    async def story() -> None:
        stopped: list[int] = []

        class Last:
            async def handle(self, envelope: Envelope[Any]) -> None:
                await engine.stop(0.01)

            async def stop(self) -> None:
                stopped.append(1)

        engine = live_engine(Last)
        await getattr(engine, verb)(TOPIC, Envelope("good night"))
        await until(lambda: stopped)
        await until(lambda: engine.get_structured_metrics().total_dispatches)

        assert (await engine.publish(TOPIC, Envelope(1))).error_code is ErrorCode.SHUT_DOWN

    asyncio.run(asyncio.wait_for(story(), 5))


def test_iterators_end_when_the_engine_stops_and_nobody_subscribes_until_it_starts() -> None:
    async def story() -> None:
        engine = live_engine(quiet)
        listener = engine.subscribe("**")
        reading = asyncio.create_task(anext(listener, "the end"))
        await engine.publish(TOPIC, Envelope(1))
        first = await reading
        reading = asyncio.create_task(anext(listener, "the end"))
        await asyncio.sleep(0)

        await engine.stop()

        assert isinstance(first, Envelope)
        assert await reading == "the end"
        with pytest.raises(InvalidState, match="stopped"):
            engine.subscribe("**")
        await engine.start()
        engine.subscribe("**").unsubscribe()
        await engine.stop()

    asyncio.run(asyncio.wait_for(story(), 5))


def test_one_who_gives_up_draining_changes_nothing() -> None:
    async def story() -> None:
        connection = Connection()
        engine = live_engine(connection)
        await engine.publish(TOPIC, Envelope("hang"))
        draining = asyncio.create_task(engine.drain())
        await until(lambda: "begin" in connection.life)

        draining.cancel()
        await asyncio.wait([draining])
        connection.gate.set()
        await engine.drain()

        assert draining.cancelled()
        assert connection.life == ["start", "begin", "end"]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_what_needs_a_frozen_engine_says_so() -> None:
    async def story() -> None:
        engine = DispatchEngine()

        for verb in (engine.start, engine.stop, engine.drain):
            with pytest.raises(InvalidState, match="freeze"):
                await verb()
        with pytest.raises(InvalidState, match="freeze"):
            _ = engine.queue_counts

    asyncio.run(story())


def test_middleware_and_filters_must_be_callable_and_middleware_comes_before_the_freeze() -> None:
    engine, wrong = make_engine(quiet), 7
    anything: Any = wrong

    with pytest.raises(InvalidParameter, match="middleware"):
        engine.add_middleware(anything)
    with pytest.raises(InvalidParameter, match="filter"):
        engine.add_filter(anything)
    with pytest.raises(InvalidState, match="frozen"):
        engine.add_middleware(lambda envelope, following: following(envelope))
    engine.add_filter(lambda envelope: True)
