import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.filters import only_types
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Receipt, Reply
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import BackpressureSettings, BackpressureStrategy, EngineSettings, RetrySettings

EVENT = MessageCategory.EVENT
TOPIC, NEXT, HEARD = "dev.order.events.v1", "dev.invoice.events.v1", "dev.heard.events.v1"
ONCE = RetrySettings(tries=1)
LONG = 3_600.0
WAIT, REJECT_NEW, DROP_OLDEST, ADAPTIVE = BackpressureStrategy


class Gate:
    """A handler that remembers, and holds its messages until it is opened."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.begun: list[Any] = []
        self._is_open = is_open
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._is_open = True
        self._opened.set()

    async def __call__(self, envelope: Envelope[Any]) -> None:
        self.begun.append(envelope.payload)
        if not self._is_open:
            await self._opened.wait()


class Office:
    """A frozen engine that remembers its results."""

    def __init__(
        self,
        handler: Any,
        *,
        topics: str | list[str] = TOPIC,
        strategy: BackpressureStrategy = REJECT_NEW,
        capacity: int = 100,
        clock: Any = None,
        **chosen: Any,
    ) -> None:
        self.results: list[DispatchResult] = []
        self.pressure: list[bool] = []
        backpressure = BackpressureSettings(strategy=strategy, capacity=capacity)
        self.engine = DispatchEngine(
            settings=EngineSettings(**{"backpressure": backpressure, "batch_wait_seconds": 0, **chosen}),
            clock=clock,
            on_result=self.results.append,
            on_pressure=self.pressure.append,
        )
        self.engine.dispatcher("a", topics=topics, category=EVENT, retry=ONCE, breaker=None)(handler)
        self.engine.freeze()

    async def publish(self, *payloads: object, topic: str = TOPIC) -> list[Receipt]:
        return [await self.engine.publish(topic, Envelope(payload)) for payload in payloads]

    def codes(self) -> list[ErrorCode | None]:
        return [result.error_code for result in self.results]


def one_at_a_time(handler: Any, **chosen: Any) -> Office:
    """One message runs, and the next ones stand in the queue."""
    return Office(handler, **{"batch_size": 1, "max_concurrent_deliveries": 1, **chosen})


async def fill(office: Office, gate: Gate) -> None:
    """One message runs, one is taken, one stands in the queue; that has room for no more than one."""
    await office.publish(1)
    await until(lambda: gate.begun)
    await office.publish(2)
    await until(lambda: office.engine.queue_counts.taken == 2)
    await office.publish(3)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


async def quiet(envelope: Envelope[Any]) -> None: ...


# Receipts


def test_a_receipt_comes_at_once_and_the_result_later() -> None:
    async def story() -> None:
        gate = Gate()
        office = Office(gate)
        envelope = Envelope("hello")

        receipt = await office.engine.publish(TOPIC, envelope)
        before = list(office.results)
        gate.open()
        await office.engine.drain()

        assert receipt == Receipt(DispatchStatus.ROUTED, TOPIC, envelope.message_id, envelope.correlation_id)
        assert before == []
        assert [(result.status, result.correlation_id) for result in office.results] == [
            (DispatchStatus.SUCCESS, envelope.correlation_id)
        ]

    run(story())


@pytest.mark.parametrize(
    ("topic", "payload", "status", "code"),
    [
        ("dev.other.events.v1", "x", DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER),
        ("dev.order.nothing", "x", DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
        (TOPIC, "x" * 11, DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_TOO_LARGE),
        (TOPIC, 7, DispatchStatus.SKIPPED, ErrorCode.FILTERED),
    ],
)
def test_a_message_that_is_refused_has_a_receipt_and_no_result(
    topic: str, payload: object, status: DispatchStatus, code: ErrorCode
) -> None:
    async def story() -> None:
        office = Office(quiet, max_payload_bytes=10)
        office.engine.add_filter(only_types("str"))
        listener = office.engine.subscribe(TOPIC)

        (receipt,) = await office.publish(payload, topic=topic)
        await office.engine.drain()

        assert (receipt.status, receipt.error_code, receipt.subscribers) == (status, code, 0)
        assert receipt.error_message
        assert (office.results, listener.pending) == ([], 0)
        assert office.engine.get_structured_metrics().statuses == {status: 1}

    run(story())


@pytest.mark.parametrize("topic", ["", " ", None])
def test_a_topic_that_is_none_is_a_mistake_of_the_caller(topic: Any) -> None:
    with pytest.raises(InvalidParameter, match="topic"):
        asyncio.run(Office(quiet).engine.publish(topic, Envelope(1)))


def test_only_envelopes_are_published() -> None:
    nothing: Any = None

    with pytest.raises(InvalidParameter, match="Envelope"):
        asyncio.run(Office(quiet).engine.publish(TOPIC, nothing))


def test_nothing_is_published_before_the_freeze() -> None:
    with pytest.raises(InvalidState, match="freeze"):
        asyncio.run(DispatchEngine().publish(TOPIC, Envelope(1)))


# Subscribers


def test_the_receipt_counts_the_subscribers_queues_that_took_it() -> None:
    async def story() -> None:
        office = Office(quiet)
        for pattern in (TOPIC, "dev.**", "dev.other.**"):
            office.engine.subscribe(pattern, capacity=1)

        receipts = await office.publish(1, 2)

        assert [receipt.subscribers for receipt in receipts] == [2, 0]

    run(story())


def test_a_message_that_only_subscribers_want_is_routed_and_needs_no_result() -> None:
    async def story() -> None:
        office = Office(quiet)
        async with office.engine.subscribe(HEARD) as listener:
            (receipt,) = await office.publish("hello", topic=HEARD)
            heard = await anext(listener)
        await office.engine.drain()

        assert (receipt.status, receipt.subscribers) == (DispatchStatus.ROUTED, 1)
        assert (heard.payload, heard.topic) == ("hello", HEARD)
        assert office.results == []

    run(story())


def test_subscribers_hear_nothing_that_was_refused_by_the_queue() -> None:
    async def story() -> None:
        office = one_at_a_time(Gate(), capacity=1)
        listener = office.engine.subscribe(TOPIC)
        await office.publish(1)

        (receipt,) = await office.publish(2)

        assert (receipt.error_code, listener.pending) == (ErrorCode.QUEUE_FULL, 1)
        await office.engine.stop(0)

    run(story())


# Outputs


@pytest.mark.parametrize("topics", [[TOPIC, NEXT], TOPIC])
def test_subscribers_hear_outputs_with_or_without_a_dispatcher(topics: str | list[str]) -> None:
    async def go_on(envelope: Envelope[Any]) -> str | None:
        return NEXT if envelope.topic == TOPIC else None

    async def story() -> None:
        office = Office(go_on, topics=topics)
        listener = office.engine.subscribe(NEXT)

        await office.engine.dispatch(TOPIC, Envelope("hello"))
        await office.engine.drain()

        assert listener.pending == 1
        assert [result.topic for result in office.results] == ([NEXT] if isinstance(topics, list) else [])
        assert DispatchStatus.NO_DISPATCHER not in office.engine.get_structured_metrics().statuses

    run(story())


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("dev.nobody.events", ErrorCode.NO_DISPATCHER),
        ("dev.nothing", ErrorCode.INVALID_TOPIC),
        (Envelope("x" * 11, topic=NEXT), ErrorCode.PAYLOAD_TOO_LARGE),
    ],
)
def test_an_output_that_cannot_be_delivered_leaves_its_parent_alone(output: Any, code: ErrorCode) -> None:
    async def go_on(envelope: Envelope[Any]) -> Any:
        return output

    async def story() -> None:
        office = Office(go_on, max_payload_bytes=10)
        listener = office.engine.subscribe(
            "dev.{}".format("nothing" if code is ErrorCode.INVALID_TOPIC else "invoice.**")
        )

        parent = await office.engine.dispatch(TOPIC, Envelope(1))
        await office.engine.drain()

        assert parent.is_successful()
        assert office.codes() == [code]
        assert listener.pending == 0

    run(story())


def test_a_chain_carries_its_correlation_and_names_each_cause() -> None:
    seen: list[Envelope[Any]] = []

    async def go_on(envelope: Envelope[Any]) -> str | None:
        seen.append(envelope)
        return NEXT if envelope.topic == TOPIC else HEARD if envelope.topic == NEXT else None

    async def story() -> None:
        office = Office(go_on, topics=[TOPIC, NEXT, HEARD])
        await office.publish("hello")
        await office.engine.drain()

    run(story())

    first, second, third = seen
    assert [envelope.hops for envelope in seen] == [0, 1, 2]
    assert {envelope.correlation_id for envelope in seen} == {first.correlation_id}
    assert (second.causation_id, third.causation_id) == (first.message_id, second.message_id)


def test_a_message_that_is_sent_again_makes_outputs_with_the_same_ids() -> None:
    seen: list[Envelope[Any]] = []

    async def go_on(envelope: Envelope[Any]) -> list[str] | None:
        if envelope.topic == NEXT:
            seen.append(envelope)
            return None
        return [NEXT, NEXT]

    async def story() -> None:
        office = Office(go_on, topics=[TOPIC, NEXT])
        envelope = Envelope("hello")
        for _ in range(2):
            await office.engine.publish(TOPIC, envelope)
        await office.engine.drain()

    run(story())

    assert sorted(Counter(envelope.message_id for envelope in seen).values()) == [2, 2]


@pytest.mark.parametrize("outputs", [[TOPIC], [TOPIC, TOPIC]])
def test_a_loop_of_outputs_ends_at_the_hop_limit(outputs: list[str]) -> None:
    async def again(envelope: Envelope[Any]) -> list[str]:
        return outputs

    async def story() -> None:
        office = Office(again, max_hops=4)
        await office.publish("hello")
        await office.engine.drain()

        generations = [len(outputs) ** hop for hop in range(5)]
        assert len(office.results) == sum(generations)
        *_, last = office.results
        assert (last.status, last.error_code) == (DispatchStatus.PUBLISH_FAILED, ErrorCode.HOP_LIMIT)
        assert Counter(office.codes()) == {None: sum(generations[:-1]), ErrorCode.HOP_LIMIT: generations[-1]}

    run(story())


def test_the_hop_limit_is_sixteen_by_default() -> None:
    hops: list[int] = []

    async def again(envelope: Envelope[Any]) -> Envelope[Any]:
        hops.append(envelope.hops)
        # Fresh, as if nothing had been before it.
        return Envelope("again", topic=TOPIC)

    async def story() -> None:
        office = Office(again)
        await office.publish("hello")
        await office.engine.drain()

    run(story())

    assert hops == list(range(17))


def test_without_room_in_the_outbox_the_message_ends_as_publish_failed() -> None:
    async def many(envelope: Envelope[Any]) -> list[str] | None:
        return [NEXT] * 3 if envelope.topic == TOPIC else None

    async def story() -> None:
        office = Office(many, topics=[TOPIC, NEXT], outbox_capacity=2)
        listener = office.engine.subscribe(NEXT)

        result = await office.engine.dispatch(TOPIC, Envelope(1))
        await office.engine.drain()

        assert (result.status, result.error_code) == (DispatchStatus.PUBLISH_FAILED, ErrorCode.OUTBOX_FULL)
        assert (result.outcomes[0].outputs, result.outputs) == ((NEXT,) * 3, ())
        assert (office.results, listener.pending) == ([], 0)

    run(story())


# Handlers that send


def test_a_handler_may_publish_dispatch_execute_and_request() -> None:
    async def story() -> None:
        done: list[object] = []
        office = Office(quiet, topics="dev.nobody.events", max_concurrent_deliveries=1)
        engine = DispatchEngine(settings=office.engine.settings)

        @engine.dispatcher("outer", topics=TOPIC, category=EVENT)
        async def outer(envelope: Envelope[Any]) -> None:
            done.append((await engine.publish(NEXT, Envelope(1))).status)
            done.append((await engine.dispatch(NEXT, Envelope(2))).status)
            done.append((await engine.execute("dev.order.commands", Envelope(3))).reply)
            done.append(await engine.request("dev.order.commands", Envelope(4)))

        engine.dispatcher("inner", topics=NEXT, category=EVENT)(quiet)

        @engine.dispatcher("answer", topics="dev.order.commands", category=MessageCategory.COMMAND)
        async def answer(envelope: Envelope[int]) -> Reply:
            return Reply(envelope.payload)

        engine.freeze()
        await engine.publish(TOPIC, Envelope(0))
        await engine.drain()

        assert done == [DispatchStatus.ROUTED, DispatchStatus.SUCCESS, Reply(3), Reply(4)]

    run(story())


def test_handlers_that_publish_into_a_full_queue_under_wait_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raydispatch.bus.publishing.HANDLER_WAIT_SECONDS", 0.01)

    async def story() -> None:
        receipts: list[Receipt] = []

        async def two_more(envelope: Envelope[Any]) -> None:
            if envelope.payload == "first":
                receipts.extend(await office.publish("second", "second"))

        office = one_at_a_time(two_more, strategy=WAIT, capacity=1, batch_size=2)
        await office.publish("first", "first", "first")
        await office.engine.drain()

        statuses = Counter(receipt.status for receipt in receipts)
        assert statuses[DispatchStatus.ROUTED] + statuses[DispatchStatus.REJECTED] == 6
        assert {receipt.error_code for receipt in receipts} <= {None, ErrorCode.QUEUE_FULL}
        assert len(office.results) == 3 + statuses[DispatchStatus.ROUTED]
        assert office.engine.queue_counts.rejected == statuses[DispatchStatus.REJECTED] > 0

    run(story())


def test_a_handler_cannot_drain_what_it_is_a_part_of() -> None:
    async def story() -> None:
        async def draining(envelope: Envelope[Any]) -> None:
            await office.engine.drain()

        office = Office(draining)
        await office.publish(1)
        await office.engine.drain()

        assert "its own end" in (office.results[0].error_message or "")

    run(story())


# Backpressure


def test_reject_new_refuses_what_finds_no_room() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, capacity=2)
        await office.publish(1)
        await until(lambda: gate.begun)

        receipts = await office.publish(2, 3, 4)
        gate.open()
        await office.engine.drain()

        assert [receipt.error_code for receipt in receipts] == [None, None, ErrorCode.QUEUE_FULL]
        assert receipts[-1].status is DispatchStatus.REJECTED
        assert gate.begun == [1, 2, 3]
        assert office.engine.queue_counts._asdict() == {
            "accepted": 3, "taken": 3, "rejected": 1, "rate_limited": 0, "dropped": 0,
        }  # fmt: skip

    run(story())


def test_drop_oldest_reports_what_it_dropped() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, strategy=DROP_OLDEST, capacity=2)
        await office.publish(1)
        await until(lambda: gate.begun)

        receipts = await office.publish(2, 3, 4)
        dropped = list(office.results)
        gate.open()
        await office.engine.drain()

        assert {receipt.status for receipt in receipts} == {DispatchStatus.ROUTED}
        assert [(result.status, result.error_code) for result in dropped] == [
            (DispatchStatus.REJECTED, ErrorCode.DROPPED)
        ]
        assert dropped[0].correlation_id == receipts[0].correlation_id
        assert gate.begun == [1, 3, 4]
        assert office.engine.queue_counts.dropped == 1

    run(story())


def test_wait_lets_the_publisher_wait_for_room() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, strategy=WAIT, capacity=1)
        await fill(office, gate)

        fourth = asyncio.create_task(office.publish(4))
        for _ in range(5):
            await asyncio.sleep(0)
        waited = not fourth.done()
        gate.open()
        (receipt,) = await fourth
        await office.engine.drain()

        assert waited
        assert receipt.status is DispatchStatus.ROUTED
        assert gate.begun == [1, 2, 3, 4]

    run(story())


def test_a_publisher_that_is_cancelled_while_it_waits_has_published_nothing() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, strategy=WAIT, capacity=1)
        listener = office.engine.subscribe(TOPIC)
        await fill(office, gate)

        fourth = asyncio.create_task(office.publish(4))
        for _ in range(5):
            await asyncio.sleep(0)
        fourth.cancel()
        await asyncio.wait([fourth])
        gate.open()
        await office.engine.drain()

        assert fourth.cancelled()
        assert (gate.begun, listener.pending, len(office.results)) == ([1, 2, 3], 3, 3)
        assert office.engine.queue_counts.accepted == 3

    run(story())


class Seconds:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def test_an_adaptive_rate_holds_back_while_the_queue_is_high_and_recovers() -> None:
    async def story() -> None:
        gate, clock = Gate(), Seconds()
        office = one_at_a_time(gate, strategy=ADAPTIVE, capacity=10, clock=clock)
        await office.publish(*range(9))
        clock.seconds += 0.1

        held_back = await office.publish("one too many")
        gate.open()
        await office.engine.drain()
        clock.seconds += 10
        let_in = await office.publish("later")
        await office.engine.drain()

        assert held_back[0].error_code is ErrorCode.RATE_LIMITED
        assert let_in[0].status is DispatchStatus.ROUTED
        assert office.engine.queue_counts.rate_limited == 1
        assert len(office.results) == 10

    run(story())


def test_pressure_is_told_when_it_comes_and_when_it_goes() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, capacity=10)

        await office.publish(*range(9))
        high = list(office.pressure)
        gate.open()
        await office.engine.drain()

        assert (high, office.pressure) == ([True], [True, False])

    run(story())


# Results


def test_one_that_fails_is_a_result_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(envelope: Envelope[Any]) -> None:
        if envelope.payload == 2:
            raise OSError("password=hunter2")

    async def story() -> None:
        office = Office(handle)
        await office.publish(1, 2, 3)
        await office.engine.drain()

        assert Counter(office.codes()) == {None: 2, ErrorCode.HANDLER_EXCEPTION: 1}
        assert len(office.engine.dead_letters) == 1

    run(story())

    assert "dispatcher did not succeed" in caplog.messages


def test_whoever_listens_to_results_and_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(result: DispatchResult) -> None:
        raise OSError("password=hunter2")

    async def story() -> None:
        gate = Gate(is_open=True)
        engine = DispatchEngine(on_result=broken)
        engine.dispatcher("a", topics=TOPIC, category=EVENT)(gate)
        engine.freeze()

        for number in range(3):
            await engine.publish(TOPIC, Envelope(number))
        await engine.drain()

        assert gate.begun == [0, 1, 2]

    run(story())

    assert caplog.messages.count("on_result failed") == 3
    assert "hunter2" not in str([record.__dict__ for record in caplog.records])


def test_published_messages_run_their_priorities_in_order() -> None:
    seen: list[str] = []

    def tracing(name: str) -> Any:
        async def handle(envelope: Envelope[Any]) -> None:
            await asyncio.sleep(0)
            seen.append(name)

        return handle

    async def story() -> None:
        engine = DispatchEngine()
        for name, priority in [("low", -1), ("high", 5), ("middle", 0)]:
            engine.dispatcher(name, topics=TOPIC, category=EVENT, priority=priority)(tracing(name))
        engine.freeze()
        await engine.publish(TOPIC, Envelope(1))
        await engine.drain()

    run(story())

    assert seen == ["high", "middle", "low"]


# Stopping


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_what_is_left_at_the_deadline_ends_as_shut_down(
    strategy: BackpressureStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, strategy=strategy)
        await office.publish(1, 2, 3)
        await until(lambda: gate.begun)

        await office.engine.stop(0.01)

        assert gate.begun == [1]
        assert office.codes() == [ErrorCode.SHUT_DOWN] * 3
        assert office.engine.get_structured_metrics().statuses == {DispatchStatus.REJECTED: 3}

    run(story())

    assert caplog.messages.count("message rejected") == 3


def test_after_a_stop_nothing_is_accepted_until_the_next_start() -> None:
    async def story() -> None:
        office = Office(quiet)
        await office.publish(1)
        await office.engine.stop()

        (refused,) = await office.publish(2)
        await office.engine.start()
        (accepted,) = await office.publish(3)
        await office.engine.stop()

        assert (refused.status, refused.error_code) == (DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN)
        assert accepted.status is DispatchStatus.ROUTED
        assert [result.status for result in office.results] == [DispatchStatus.SUCCESS] * 2
        assert office.engine.queue_counts[:3] == (2, 2, 1)

    run(story())


def test_one_who_waits_for_room_when_the_engine_stops_is_refused() -> None:
    async def story() -> None:
        gate = Gate()
        office = one_at_a_time(gate, strategy=WAIT, capacity=1)
        await fill(office, gate)
        waiting = asyncio.create_task(office.publish(4))
        for _ in range(5):
            await asyncio.sleep(0)

        await office.engine.stop(0.01)
        (receipt,) = await waiting

        assert (receipt.status, receipt.error_code) == (DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN)
        assert len(office.results) == 3

    run(story())


def test_two_who_stop_at_once_count_once() -> None:
    async def story() -> None:
        office = Office(quiet)
        await office.publish(1, 2)

        await asyncio.gather(office.engine.stop(), office.engine.stop())

        assert office.engine.queue_counts[:2] == (2, 2)

    run(story())


# Event loops


def test_a_loop_that_ends_without_a_stop_loses_nothing_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    office = one_at_a_time(Gate(), batch_size=2)

    async def story() -> None:
        await office.publish(1, 2, 3)
        await until(lambda: office.engine.queue_counts.taken)

    asyncio.run(story())

    assert office.codes() == [ErrorCode.SHUT_DOWN] * 3
    assert caplog.messages.count("message rejected") == 3


def test_a_loop_that_ends_right_after_a_publish_loses_nothing_in_silence() -> None:
    office = Office(quiet, batch_wait_seconds=LONG)

    asyncio.run(office.publish(1))

    assert office.codes() == [ErrorCode.SHUT_DOWN]


def test_a_message_published_while_the_loop_ends_is_refused_or_abandoned() -> None:
    office = Office(quiet)

    async def last_words() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await office.publish("goodbye")

    async def story() -> None:
        await office.publish("hello")
        tasks.extend(asyncio.create_task(last_words()) for _ in range(20))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(story())

    statuses = office.engine.get_structured_metrics().statuses
    assert sum(statuses.values()) == 21
    assert set(statuses) <= {DispatchStatus.REJECTED, DispatchStatus.SUCCESS}


def test_a_loop_closed_with_tasks_pending_is_cleared_up_by_the_next_one() -> None:
    office = Office(quiet, batch_wait_seconds=LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(office.publish(1))
    pending = asyncio.all_tasks(loop)
    loop.close()

    async def story() -> None:
        await office.publish(2)
        await office.engine.drain()

    run(story())

    assert office.codes() == [ErrorCode.SHUT_DOWN, None]
    assert office.engine.queue_counts[:2] == (2, 2)
    for task in pending:
        # Or asyncio complains of tasks that were destroyed.
        task.get_coro().close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_several_threads_publish_to_one_engine_each_in_its_own_loops() -> None:
    office = Office(quiet)

    async def story(number: int) -> None:
        await office.publish(*range(number, number + 5))
        await office.engine.drain()

    def many(start: int) -> None:
        for number in range(50):
            asyncio.run(story(start + number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(0, 4_000, 1_000)))

    assert Counter(result.status for result in office.results) == {DispatchStatus.SUCCESS: 1_000}
    assert office.engine.queue_counts[:2] == (1_000, 1_000)


def test_counts_can_be_read_while_loops_come_and_go() -> None:
    office = Office(quiet)

    def many(_: int) -> None:
        for number in range(100):
            asyncio.run(office.publish(number))

    def reading(_: int) -> Iterator[int]:
        for _ in range(500):
            yield sum(office.engine.queue_counts)

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(many, number) for number in range(3)]
        readings = list(reading(0))
        for one in work:
            one.result()

    assert len(readings) == 500
    assert office.engine.queue_counts.accepted == len(office.results) == 300


# Everything at once


@settings(deadline=None, max_examples=200)
@given(
    strategy=st.sampled_from(BackpressureStrategy),
    capacity=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    concurrency=st.integers(1, 3),
    steps=st.lists(
        st.sampled_from(["fine", "slow", "failing", "next", "nobody", "filtered", "(pass)", "(open)", "(drain)"]),
        max_size=25,
    ),
    patience=st.sampled_from([0, 0.01, 5]),
)
def test_every_message_ends_exactly_once_and_the_counts_add_up(
    strategy: BackpressureStrategy, capacity: int, batch_size: int, concurrency: int, steps: list[str], patience: float
) -> None:
    async def story() -> None:
        gate = asyncio.Event()

        async def handle(envelope: Envelope[str]) -> str | None:
            if envelope.payload == "slow":
                await gate.wait()
            if envelope.payload == "failing":
                raise OSError("down")
            return NEXT if envelope.payload == "next" and envelope.topic == TOPIC else None

        office = Office(
            handle,
            topics=[TOPIC, NEXT],
            strategy=strategy,
            capacity=capacity,
            batch_size=batch_size,
            max_concurrent_deliveries=concurrency,
        )
        office.engine.add_filter(lambda envelope: envelope.payload != "filtered")
        publishing: list[asyncio.Task[Receipt]] = []
        for step in steps:
            if step == "(pass)":
                await asyncio.sleep(0)
            elif step == "(open)":
                gate.set()
            elif step == "(drain)" and gate.is_set():
                await office.engine.drain()
            elif not step.startswith("("):
                topic = "dev.nobody.events" if step == "nobody" else TOPIC
                publishing.append(asyncio.create_task(office.engine.publish(topic, Envelope(step))))
        await asyncio.sleep(0)
        if patience == 5:
            gate.set()
        await office.engine.stop(patience)
        receipts = await asyncio.gather(*publishing)

        routed = Counter(receipt.correlation_id for receipt in receipts if receipt.status is DispatchStatus.ROUTED)
        ended = Counter(result.correlation_id for result in office.results if result.topic == TOPIC)
        assert ended == routed
        # One output for each that succeeded in sending it on, and each of these has ended as well.
        sent_on = sum(len(result.outputs) for result in office.results)
        assert sent_on == sum(result.topic == NEXT for result in office.results)
        accepted, taken, rejected, rate_limited, dropped = office.engine.queue_counts
        codes = Counter(receipt.error_code for receipt in receipts)
        assert accepted == routed.total() == taken + dropped
        assert rejected == codes[ErrorCode.QUEUE_FULL] + codes[ErrorCode.SHUT_DOWN]
        assert rate_limited == codes[ErrorCode.RATE_LIMITED]
        assert dropped == Counter(office.codes())[ErrorCode.DROPPED]
        assert sum(office.engine.get_structured_metrics().statuses.values()) == len(receipts) + sent_on

    logging.getLogger("raydispatch").setLevel(logging.CRITICAL)
    try:
        run(story())
    finally:
        logging.getLogger("raydispatch").setLevel(logging.NOTSET)
