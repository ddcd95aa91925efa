"""Durable messages in one process: an engine with a journal, over several lives."""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from tests.delivery.fakes import MemoryJournal, turns, until

import raydispatch.delivery.post as post_module
from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.filters import only_types
from raydispatch.delivery.letters import LetterFilter
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.outcome import DispatchStatus, Receipt
from raydispatch.errors import ErrorCode, InvalidParameter, InvalidState, InvalidTable, JournalUnavailable
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import (
    BreakerSettings,
    Delivery,
    EngineSettings,
    JournalSettings,
    PoisonPolicy,
    RetrySettings,
)

EVENT = MessageCategory.EVENT
TOPIC, NEXT, NOBODYS = "dev.order.events.v1", "dev.invoice.events.v1", "dev.other.events.v1"
ONCE = RetrySettings(tries=1)
AT_ONCE = RetrySettings(tries=3, first_delay_seconds=0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


class Order(BaseModel):
    number: int


class Recorder:
    """A handler that remembers what it got, and fails as often as it is told to."""

    def __init__(self, output: Any = None, *, failures: int = 0) -> None:
        self.got: list[Envelope[Any]] = []
        self.output = output
        self.failures = failures
        self.gate: asyncio.Event | None = None

    async def __call__(self, envelope: Envelope[Any]) -> Any:
        self.got.append(envelope)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("no disk")
        return self.output

    @property
    def payloads(self) -> list[Any]:
        return [envelope.payload for envelope in self.got]


class Town:
    """A journal in memory that outlives its engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = MemoryJournal()

        async def open_memory(url: str, name: str) -> MemoryJournal:
            return self.journal

        monkeypatch.setattr(post_module, "open_journal", open_memory)

    def engine(self, handler: Any = None, *, journal: dict[str, Any] | None = None, **options: Any) -> DispatchEngine:
        """One with a dispatcher for the topic, if there is a handler; not frozen yet."""
        chosen = {"url": "sqlite:///x.db", "patience_seconds": 0, "watchdog_seconds": 0.01, **(journal or {})}
        engine = DispatchEngine("orders", settings=EngineSettings(journal=JournalSettings(**chosen), stop_seconds=0.2))
        if handler is not None:
            options = {"topics": TOPIC, "category": EVENT, "retry": AT_ONCE, "breaker": None, **options}
            engine.dispatcher("billing", **options)(handler)
        return engine

    @property
    def letters(self) -> dict[str, bytes]:
        return self.journal.buckets.get("letters", {})


@pytest.fixture
def town(monkeypatch: pytest.MonkeyPatch) -> Town:
    return Town(monkeypatch)


def lag(engine: DispatchEngine, name: str = "billing") -> int:
    return next(status.lag for status in engine.journal.statuses() if status.name == name)


async def publish(engine: DispatchEngine, *payloads: Any, topic: str = TOPIC, **options: Any) -> list[Receipt]:
    return await engine.publish_many([(topic, Envelope(one, "Placed")) for one in payloads], durable=True, **options)


# Publishing


def test_what_is_published_durably_is_in_the_journal_and_comes_to_its_dispatcher(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            envelope = Envelope({"order": 7}, "Placed", key="a", headers={"tenant": "x"})

            receipt = await engine.publish(TOPIC, envelope, durable=True)
            in_journal = len(town.journal.batches)
            await until(lambda: lag(engine) == 0)

            assert receipt == Receipt(DispatchStatus.ROUTED, TOPIC, envelope.message_id, envelope.correlation_id)
            assert in_journal == 1
            assert handler.got == [envelope.with_topic(TOPIC)]

    run(story())


def test_a_model_comes_as_the_model_that_the_handler_asks_for(town: Town) -> None:
    async def story() -> None:
        got: list[Order] = []

        async def handler(envelope: Envelope[Order]) -> None:
            got.append(envelope.payload)

        async with town.engine(handler) as engine:
            await publish(engine, Order(number=7), {"number": 8})
            await until(lambda: len(got) == 2)

        assert got == [Order(number=7), Order(number=8)]

    run(story())


def test_many_go_into_the_journal_in_one_write(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            receipts = await publish(engine, *range(100))
            await until(lambda: len(handler.got) == 100)

            assert {receipt.status for receipt in receipts} == {DispatchStatus.ROUTED}
            assert town.journal.appends == 1
            assert sorted(handler.payloads) == list(range(100))

    run(story())


def test_one_bad_message_costs_the_others_nothing(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            messages: list[tuple[str, Envelope[Any]]] = [
                (TOPIC, Envelope(1)),
                (TOPIC, Envelope(object())),
                (NOBODYS, Envelope(3)),
                ("no category", Envelope(4)),
                (TOPIC, Envelope("x" * 2_000_000)),
                (TOPIC, Envelope(2**70)),
                (TOPIC, Envelope(7)),
            ]

            receipts = await engine.publish_many(messages, durable=True)
            await until(lambda: len(handler.got) == 2)

            assert [(receipt.status, receipt.error_code) for receipt in receipts] == [
                (DispatchStatus.ROUTED, None),
                (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID),
                (DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER),
                (DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC),
                (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_TOO_LARGE),
                (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID),
                (DispatchStatus.ROUTED, None),
            ]
            assert [receipt.message_id for receipt in receipts] == [envelope.message_id for _, envelope in messages]
            assert handler.payloads == [1, 7]
            assert all(receipt.error_message for receipt in receipts if receipt.error_code)

    run(story())


def test_nothing_is_a_list_of_nothing(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine:
            assert await publish(engine) == []
            assert town.journal.appends == 0

    run(story())


def test_a_message_that_is_published_again_is_accepted_and_stored_once(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        envelope = Envelope(1)
        async with town.engine(handler) as engine:
            first = await engine.publish(TOPIC, envelope, durable=True)
            second = await engine.publish(TOPIC, envelope, durable=True)
            await until(lambda: lag(engine) == 0)

        async with town.engine(handler) as engine:
            third = await engine.publish(TOPIC, envelope, durable=True)
            await turns()

        assert first == second == third
        assert len(handler.got) == 1

    run(story())


def test_what_a_filter_holds_back_is_not_kept(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine:
            engine.add_filter(only_types("Paid"))

            (receipt,) = await publish(engine, 1)

            assert (receipt.status, receipt.error_code) == (DispatchStatus.SKIPPED, ErrorCode.FILTERED)
            assert town.journal.batches == []

    run(story())


def test_subscribers_of_this_process_hear_it_at_once(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine, engine.subscribe("**") as messages:
            (receipt,) = await publish(engine, 7)

            assert receipt.subscribers == 1
            assert (await anext(aiter(messages))).payload == 7

    run(story())


def test_a_journal_that_is_away_refuses_after_its_patience(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            town.journal.away = True
            receipts = await publish(engine, 1, 2)
            town.journal.away = False
            again = await publish(engine, 3)
            await until(lambda: handler.got)

            assert [(one.status, one.error_code) for one in receipts] == [
                (DispatchStatus.REJECTED, ErrorCode.JOURNAL_UNAVAILABLE)
            ] * 2
            assert again[0].status is DispatchStatus.ROUTED
            assert handler.payloads == [3]

    run(story())


def test_a_type_that_is_no_text_is_refused_and_spoils_no_other(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            bad, good = await asyncio.gather(
                engine.publish(TOPIC, Envelope(1, message_type="\ud800"), durable=True),
                engine.publish(TOPIC, Envelope(2), durable=True),
                return_exceptions=True,
            )

            assert isinstance(good, Receipt)
            assert good.status is DispatchStatus.ROUTED
            assert isinstance(bad, Receipt)
            assert bad.status is DispatchStatus.INVALID_MESSAGE

    run(story())


def test_what_was_not_kept_is_never_said_to_be(town: Town) -> None:
    class Fickle(BaseModel):
        looks: int = 0

        def model_dump(self, **_: Any) -> Any:
            type(self).seen = getattr(type(self), "seen", 0) + 1  # type: ignore[attr-defined]
            if type(self).seen == 1:  # type: ignore[attr-defined]
                raise ValueError("not yet")
            return {}

    async def story() -> None:
        async with town.engine(Recorder()) as engine:
            (receipt,) = await publish(engine, Fickle())

            assert (receipt.status is DispatchStatus.ROUTED) == (len(town.journal.batches) == 1)

    run(story())


# Mistakes of the program


def test_without_a_journal_the_sentence_says_how_to_have_one() -> None:
    async def story() -> None:
        engine = DispatchEngine("orders")
        engine.dispatcher("billing", topics=TOPIC, category=EVENT)(Recorder())
        async with engine:
            for asking in (
                lambda: engine.publish(TOPIC, Envelope(1), durable=True),
                lambda: engine.publish_many([(TOPIC, Envelope(1))], durable=True),
                lambda: engine.consume("feed"),
            ):
                with pytest.raises(InvalidState, match=r"no journal: give it one, .*journal="):
                    await asking()
            with pytest.raises(InvalidState, match="journal"):
                _ = engine.journal

    run(story())


def test_an_engine_that_does_not_run_says_so(town: Town) -> None:
    async def story() -> None:
        engine = town.engine(Recorder())
        engine.freeze()

        with pytest.raises(InvalidState, match="async with engine"):
            await engine.publish(TOPIC, Envelope(1), durable=True)
        async with engine:
            pass
        with pytest.raises(InvalidState, match="async with engine"):
            await engine.consume("feed")

    run(story())


def test_a_time_of_delivery_needs_a_journal_to_remember_it(town: Town) -> None:
    async def story() -> None:
        at = datetime.now(UTC)
        async with town.engine(Recorder()) as engine:
            with pytest.raises(InvalidParameter, match="durable=True"):
                await engine.publish(TOPIC, Envelope(1), deliver_at=at)
            with pytest.raises(InvalidParameter, match="durable=True"):
                await engine.publish_many([(TOPIC, Envelope(1))], deliver_at=at)

    run(story())


def test_a_mistake_in_one_of_many_is_raised_before_anything_is_kept(town: Town) -> None:
    async def story() -> None:
        wrong: Any = "no envelope"
        async with town.engine(Recorder()) as engine:
            with pytest.raises(InvalidParameter, match="Envelope"):
                await engine.publish_many([(TOPIC, Envelope(1)), (TOPIC, wrong)], durable=True)
            with pytest.raises(InvalidParameter, match="topic"):
                await engine.publish_many([(TOPIC, Envelope(1)), (" ", Envelope(2))], durable=True)

            assert town.journal.batches == []

    run(story())


def test_outputs_for_a_journal_that_is_not_there_are_a_fault_of_the_table() -> None:
    engine = DispatchEngine("orders")
    engine.dispatcher("billing", topics=TOPIC, category=EVENT, outputs="journal")(Recorder(NEXT))

    with pytest.raises(InvalidTable, match="'billing' go to the journal, and there is none"):
        engine.freeze()


# Time


def test_a_message_is_delivered_when_it_is_due(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        now = datetime.now(UTC)
        async with town.engine(handler) as engine:
            await publish(engine, "late", deliver_at=now + timedelta(hours=1))
            await publish(engine, "soon", deliver_at=now + timedelta(seconds=0.2))
            await publish(engine, "past", deliver_at=now - timedelta(hours=1))
            await publish(engine, "now")
            await until(lambda: len(handler.got) == 3)

            assert sorted(handler.payloads[:2]) == ["now", "past"]
            assert handler.payloads[2] == "soon"
            assert datetime.now(UTC) >= now + timedelta(seconds=0.2)
            assert lag(engine) == 4

    run(story())


def test_a_moment_without_a_zone_is_one_of_this_machine(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler) as engine:
            await publish(engine, 1, deliver_at=datetime.now() - timedelta(seconds=1))
            await until(lambda: handler.got)

    run(story())


# Dispatchers


def test_a_message_that_fails_is_tried_again_and_then_kept_apart(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(failures=3)
        async with town.engine(handler) as engine:
            await publish(engine, 1)
            await until(lambda: town.letters)
            await until(lambda: lag(engine) == 0)

            (letter,) = [one async for one in engine.journal.letters.find()]

            assert [envelope.attempt for envelope in handler.got] == [1, 2, 3]
            assert (letter.outcome.dispatcher_id, letter.outcome.attempts) == ("billing", 3)
            assert (letter.outcome.error_type, letter.outcome.error_code) == ("OSError", ErrorCode.HANDLER_EXCEPTION)
            assert letter.table_version == engine.table.version

    run(story())


def test_a_payload_that_does_not_fit_is_kept_apart_at_once(town: Town) -> None:
    async def story() -> None:
        async def handler(envelope: Envelope[Order]) -> None:
            raise AssertionError("it never runs")

        async with town.engine(handler) as engine:
            await publish(engine, {"number": "seven"})
            await until(lambda: town.letters)

            (letter,) = [one async for one in engine.journal.letters.find()]

            assert letter.outcome.status is DispatchStatus.INVALID_MESSAGE
            assert letter.envelope.payload == {"number": "seven"}
            assert "seven" not in (letter.outcome.error_message or "")

    run(story())


def test_an_open_circuit_costs_no_try(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(failures=2)
        breaker = BreakerSettings(failure_threshold=2, reset_after_seconds=0.1)
        delivery = Delivery.reliable_exclusive(window=1)
        async with town.engine(handler, breaker=breaker, delivery=delivery) as engine:
            await publish(engine, 1, 2, 3)
            await until(lambda: engine.circuit_state("billing") is CircuitState.OPEN)
            meanwhile = len(handler.got)
            await until(lambda: lag(engine) == 0)

            assert meanwhile == 2
            assert handler.payloads == [1, 1, 1, 2, 3]
            assert town.letters == {}

    run(story())


@pytest.mark.parametrize("poison", [PoisonPolicy.DROP, PoisonPolicy.BLOCK])
def test_a_dispatcher_chooses_what_becomes_of_poison(town: Town, poison: PoisonPolicy) -> None:
    async def story() -> None:
        handler = Recorder(failures=10 if poison is PoisonPolicy.BLOCK else 3)
        delivery = Delivery.reliable_exclusive(window=1)
        async with town.engine(handler, poison=poison, delivery=delivery) as engine:
            await publish(engine, "bad", "good")
            await until(lambda: lag(engine) == 0)

            tries = handler.payloads.count("bad")
            assert (tries, town.letters) == (11 if poison is PoisonPolicy.BLOCK else 3, {})
            assert handler.payloads[-1] == "good"

    run(story())


def test_no_more_run_at_once_than_the_dispatcher_may(town: Town) -> None:
    async def story() -> None:
        running, most = 0, 0

        async def handler(envelope: Envelope[Any]) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await turns(3)
            running -= 1

        async with town.engine(handler, concurrency=3) as engine:
            await publish(engine, *range(50))
            await until(lambda: lag(engine) == 0)

        assert most == 3

    run(story())


def test_of_each_key_the_order_is_kept(town: Town) -> None:
    async def story() -> None:
        done: list[tuple[str | None, int]] = []

        async def handler(envelope: Envelope[Any]) -> None:
            await turns(envelope.payload % 3)
            done.append((envelope.key, envelope.payload))

        async with town.engine(handler, delivery=Delivery.reliable_key_shared(), replicas=3) as engine:
            await engine.publish_many(
                [(TOPIC, Envelope(number, key=f"k{number % 4}")) for number in range(60)], durable=True
            )
            await until(lambda: lag(engine) == 0)

        for key in {key for key, _ in done}:
            numbers = [number for one, number in done if one == key]
            assert numbers == sorted(numbers)
        assert len(done) == 60

    run(story())


def test_exclusive_with_a_window_of_one_is_one_after_the_other(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        async with town.engine(handler, delivery=Delivery.reliable_exclusive(window=1), replicas=3) as engine:
            handler.gate = asyncio.Event()
            await publish(engine, 1, 2, 3)
            await until(lambda: handler.got)
            await turns()
            at_first = list(handler.payloads)
            handler.gate.set()
            await until(lambda: lag(engine) == 0)

        assert (at_first, handler.payloads) == ([1], [1, 2, 3])

    run(story())


def test_what_runs_from_the_journal_is_counted(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(failures=1)
        async with town.engine(handler) as engine:
            await publish(engine, 1, 2)
            await until(lambda: lag(engine) == 0)

            metrics = engine.get_dispatcher_metrics("billing")

            assert metrics is not None
            assert (metrics.execution_count, metrics.success_count, metrics.error_count) == (3, 2, 1)

    run(story())


def test_each_dispatcher_has_a_subscription_of_its_own(town: Town) -> None:
    async def story() -> None:
        bad, good = Recorder(failures=1), Recorder()
        engine = town.engine(bad, retry=ONCE)
        engine.dispatcher("mailing", topics="dev.**", category=EVENT)(good)
        async with engine:
            await publish(engine, 1)
            await publish(engine, 2, topic=NEXT)
            await until(lambda: lag(engine) == 0 and lag(engine, "mailing") == 0)

            assert (bad.payloads, sorted(good.payloads)) == ([1], [1, 2])
            assert [one.outcome.dispatcher_id async for one in engine.journal.letters.find()] == ["billing"]

    run(story())


def test_at_most_once_a_message_that_fails_is_not_tried_again(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(failures=1)
        async with town.engine(handler, at_most_once=True) as engine:
            await publish(engine, 1)
            await until(lambda: town.letters)
            await turns()

        assert handler.payloads == [1]
        async with town.engine(handler, at_most_once=True):
            await turns()
        assert handler.payloads == [1]

    run(story())


# Several lives


def test_the_next_engine_goes_on_where_the_last_one_was(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(), Recorder()
        async with town.engine(first) as engine:
            await publish(engine, 1, 2)
            await until(lambda: lag(engine) == 0)
            await publish(engine, 3, deliver_at=datetime.now(UTC) + timedelta(seconds=0.1))
        await asyncio.sleep(0)

        async with town.engine(second) as engine:
            await publish(engine, 4)
            await until(lambda: lag(engine) == 0)

        assert first.payloads == [1, 2]
        assert sorted(second.payloads) == [3, 4]

    run(story())


def test_one_engine_can_be_started_again(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        engine = town.engine(handler)
        for number in range(3):
            async with engine:
                await publish(engine, number)
                await until(lambda: lag(engine) == 0)

        assert handler.payloads == [0, 1, 2]
        assert town.journal.closes == 3

    run(story())


def test_what_was_under_way_at_the_end_is_delivered_again(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(), Recorder()
        first.gate = asyncio.Event()
        engine = town.engine(first)
        async with engine:
            await publish(engine, 1, 2)
            await until(lambda: len(first.got) == 2)
            await engine.stop(0)
        async with town.engine(second) as engine:
            await until(lambda: lag(engine) == 0)

        assert sorted(second.payloads) == [1, 2]
        assert all(envelope.attempt > 1 for envelope in second.got)

    run(story())


def test_what_is_under_way_may_end_before_the_engine_stops(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(), Recorder()
        first.gate = asyncio.Event()
        engine = town.engine(first, delivery=Delivery.reliable_exclusive(window=1))
        async with engine:
            await publish(engine, *range(50))
            await until(lambda: first.got)
            stopping = asyncio.ensure_future(engine.stop(5))
            await turns()
            first.gate.set()
            await stopping
        done = list(first.payloads)
        async with town.engine(second) as engine:
            await until(lambda: lag(engine) == 0)

        # It took no more after it was told to stop, although there was more.
        assert done == [0]
        assert second.payloads == list(range(1, 50))

    run(story())


def test_what_nobody_had_before_an_end_in_order_is_a_first_delivery(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(), Recorder()
        first.gate = asyncio.Event()
        engine = town.engine(first, delivery=Delivery.reliable_exclusive(window=1))
        async with engine:
            await publish(engine, *range(5))
            await until(lambda: first.got)
            stopping = asyncio.ensure_future(engine.stop(5))
            await turns()
            first.gate.set()
            await stopping
        async with town.engine(second) as engine:
            await until(lambda: lag(engine) == 0)

        assert {envelope.payload: envelope.attempt for envelope in second.got} == dict.fromkeys(range(1, 5), 1)

    run(story())


def test_nothing_runs_after_the_engine_has_stopped(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        handler.gate = asyncio.Event()
        engine = town.engine(handler, concurrency=1)
        async with engine:
            await publish(engine, *range(5))
            await until(lambda: handler.got)
            await engine.stop(0)

        handler.gate.set()
        await turns()

        assert handler.payloads == [0]

    run(story())


def test_a_stopped_engine_takes_nothing_more(town: Town) -> None:
    async def story() -> None:
        handler = Recorder()
        handler.gate = asyncio.Event()
        engine = town.engine(handler)
        async with engine:
            await publish(engine, 1)
            await until(lambda: handler.got)
            stopping = asyncio.ensure_future(engine.stop(5))
            await turns()

            (receipt,) = await publish(engine, 2)
            handler.gate.set()
            await stopping

            assert (receipt.status, receipt.error_code) == (DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN)

    run(story())


def test_when_the_journal_cannot_be_opened_no_handler_stays_started(town: Town) -> None:
    events: list[str] = []

    class Handler:
        def start(self) -> None:
            events.append("start")

        def stop(self) -> None:
            events.append("stop")

        async def handle(self, envelope: Envelope[Any]) -> None: ...

    async def story() -> None:
        town.journal.away = True
        engine = town.engine(Handler)
        engine.freeze()

        with pytest.raises(JournalUnavailable):
            await engine.start()

        assert events in (["start", "stop"], [])

    run(story())


def test_what_is_delivered_while_the_engine_still_starts_has_a_way_out(town: Town) -> None:
    async def story() -> None:
        # Whatever breaks here need not be complained of in the middle of another test.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        stuck = Recorder()
        stuck.gate = asyncio.Event()
        engine = town.engine(stuck)
        async with engine:
            await publish(engine, 7)
            await until(lambda: stuck.got)
            await engine.stop(0)
        town.journal.turns = 50
        second = Recorder()
        engine = town.engine(Recorder(NEXT), outputs="journal")
        engine.dispatcher("invoices", topics=NEXT, category=EVENT)(second)
        for number in range(5):
            engine.dispatcher(f"late-{number}", topics=NOBODYS, category=EVENT)(Recorder())
        async with engine:
            await until(lambda: second.got, 1)

    run(story())


# Dead letters


def test_a_dead_letter_of_a_message_that_was_dispatched_is_in_the_journal_too(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(failures=3)
        async with town.engine(handler) as engine:
            result = await engine.dispatch(TOPIC, Envelope({"order": 7}))
            await until(lambda: town.letters)

            assert result.status is DispatchStatus.DISPATCHER_ERROR
            assert [letter.envelope.payload for letter in engine.dead_letters.list()] == [{"order": 7}]

        async with town.engine(handler) as engine:
            assert [one.envelope.payload async for one in engine.journal.letters.find()] == [{"order": 7}]
            assert len(engine.dead_letters) == 0

    run(story())


def test_dead_letters_are_safe_when_the_engine_stops(town: Town) -> None:
    async def story() -> None:
        town.journal.turns = 20
        async with town.engine(Recorder(failures=9), retry=ONCE) as engine:
            for number in range(3):
                await engine.dispatch(TOPIC, Envelope(number))

        assert len(town.letters) == 3

    run(story())


def test_a_dead_letter_that_is_no_data_stays_in_memory(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with town.engine(Recorder(failures=1), retry=ONCE) as engine:
            result = await engine.dispatch(TOPIC, Envelope(object()))

            assert result.status is DispatchStatus.DISPATCHER_ERROR
            assert len(engine.dead_letters) == 1
        assert town.letters == {}

    with caplog.at_level(logging.WARNING, "raydispatch"):
        run(story())
    assert "dead letter not in the journal" in [record.message for record in caplog.records]


def test_an_error_whose_words_are_no_text_is_an_outcome(town: Town) -> None:
    async def story() -> None:
        async def handler(envelope: Envelope[Any]) -> None:
            raise FileNotFoundError("report-\udcff.csv")

        async with town.engine(handler, retry=ONCE) as engine:
            result = await engine.dispatch(TOPIC, Envelope(1))
            await publish(engine, 2)
            await until(lambda: len(town.letters) == 2, 1)

            assert result.status is DispatchStatus.DISPATCHER_ERROR
            assert lag(engine) == 0

    run(story())


def test_a_letter_is_redriven_to_the_dispatcher_that_failed(town: Town) -> None:
    async def story() -> None:
        bad, good = Recorder(failures=1), Recorder()
        engine = town.engine(bad, retry=ONCE)
        engine.dispatcher("mailing", topics=TOPIC, category=EVENT)(good)
        async with engine:
            await engine.dispatch(TOPIC, Envelope(7))
            await until(lambda: town.letters)

            count = await engine.journal.letters.redrive(LetterFilter(dispatcher_id="billing"))
            await until(lambda: lag(engine) == 0 and lag(engine, "mailing") == 0)

            assert (count, bad.payloads, good.payloads) == (1, [7, 7], [7])
            assert [envelope.attempt for envelope in bad.got] == [1, 2]
            assert town.letters == {}

    run(story())


def test_a_journal_that_is_away_does_not_hold_up_the_end_for_ever(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_module, "CLOSE_SECONDS", 0.05)

    async def story() -> None:
        engine = town.engine(Recorder(failures=1), retry=ONCE)
        engine.freeze()
        await engine.start()
        town.journal.away = True
        await engine.dispatch(TOPIC, Envelope(1))

        try:
            async with asyncio.timeout(0.5):
                await engine.stop(0)
        finally:
            town.journal.away = False

    run(story())


def test_a_dead_letter_of_another_event_loop_is_kept(town: Town) -> None:
    async def story() -> None:
        town.journal.turns = 5
        async with town.engine(Recorder(failures=1), retry=ONCE) as engine:

            def elsewhere() -> None:
                asyncio.run(engine.dispatch(TOPIC, Envelope(7)))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await until(lambda: not thread.is_alive())
            await turns(100)

            assert len(town.letters) == 1

    run(story())


# Outputs


def test_outputs_may_go_into_the_journal(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(NEXT), Recorder()
        engine = town.engine(first, outputs="journal")
        engine.dispatcher("invoices", topics=NEXT, category=EVENT)(second)
        async with engine:
            result = await engine.dispatch(TOPIC, Envelope(7))
            await until(lambda: second.got)

            (after,) = second.got
            assert (result.status, result.outputs) == (DispatchStatus.SUCCESS, (NEXT,))
            assert (after.payload, after.topic, after.hops) == (7, NEXT, 1)
            assert len(town.journal.batches) == 1

    run(story())


def test_outputs_in_the_journal_survive_the_engine(town: Town) -> None:
    async def story() -> None:
        second = Recorder()
        async with town.engine(Recorder()) as engine:
            reader = await engine.consume("feed", NEXT)
            await reader.close()
        async with town.engine(Recorder(NEXT), outputs="journal") as engine:
            await engine.dispatch(TOPIC, Envelope(7))
        async with town.engine(second) as engine, await engine.consume("feed", NEXT) as reader:
            (message,) = await reader.batch()

            assert (message.envelope.payload, message.envelope.topic) == (7, NEXT)
            message.ack()

    run(story())


def test_what_was_made_and_not_published_is_published_at_the_next_try_without_running_again(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(NEXT), Recorder()
        engine = town.engine(first, outputs="journal")
        engine.dispatcher("invoices", topics=NEXT, category=EVENT)(second)
        envelope = Envelope(7)
        async with engine:
            town.journal.away = True
            failed = await engine.dispatch(TOPIC, envelope)
            town.journal.away = False
            again = await engine.dispatch(TOPIC, envelope)
            await until(lambda: second.got)

            assert (failed.status, failed.outputs) == (DispatchStatus.PUBLISH_FAILED, ())
            assert (again.status, again.outputs) == (DispatchStatus.SUCCESS, (NEXT,))
            assert (len(first.got), len(second.got)) == (1, 1)

    run(story())


def test_a_durable_message_whose_output_finds_no_room_runs_once(town: Town) -> None:
    async def story() -> None:
        first, second = Recorder(NEXT), Recorder()
        engine = town.engine(first, outputs="journal")
        engine.dispatcher("invoices", topics=NEXT, category=EVENT)(second)
        async with engine:
            first.gate = asyncio.Event()
            await publish(engine, 7)
            await until(lambda: first.got)
            town.journal.away = True
            first.gate.set()
            await until(lambda: engine.journal.subscriptions["billing"].retried)
            town.journal.away = False
            await until(lambda: second.got)
            await until(lambda: lag(engine) == 0)

            assert (first.payloads, second.payloads) == ([7], [7])
            assert town.letters == {}

    run(story())


def test_an_output_that_is_no_data_is_named_as_such(town: Town) -> None:
    async def story() -> None:
        handler = Recorder(Envelope(object(), topic=NEXT))
        async with town.engine(handler, outputs="journal") as engine:
            result = await engine.dispatch(TOPIC, Envelope(7))

            assert result.is_error()
            assert "no room" not in (result.error_message or "")

    run(story())


# Readers


def test_a_reader_gets_what_fits_and_says_what_became_of_it(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine, await engine.consume("feed", "dev.*.events.v1") as reader:
            await publish(engine, "ack", "nack", "reject")
            seen: list[tuple[Any, int]] = []
            while len(seen) < 4:
                for message in await reader.batch():
                    payload, attempt = message.envelope.payload, message.envelope.attempt
                    seen.append((payload, attempt))
                    if payload == "reject":
                        message.reject("no such order")
                    elif payload == "nack" and attempt == 1:
                        message.nack(delay_seconds=0)
                    else:
                        message.ack()
            await until(lambda: lag(engine, "feed") == 0)

            assert seen == [("ack", 1), ("nack", 1), ("reject", 1), ("nack", 2)]
            (letter,) = [one async for one in engine.journal.letters.find()]
            assert (letter.outcome.dispatcher_id, letter.outcome.error_message) == ("feed", "no such order")
            assert letter.envelope.payload == "reject"

    run(story())


def test_a_reader_alone_is_reason_enough_to_accept_a_message(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            (before,) = await publish(engine, 1, topic=NEXT)
            async with await engine.consume("feed", NEXT) as reader:
                (during,) = await publish(engine, 2, topic=NEXT)
                (message,) = await reader.batch()
                message.ack()
            (after,) = await publish(engine, 3, topic=NEXT)

            assert [one.status for one in (before, during, after)] == [
                DispatchStatus.NO_DISPATCHER,
                DispatchStatus.ROUTED,
                DispatchStatus.NO_DISPATCHER,
            ]
            assert message.envelope.payload == 2

    run(story())


def test_readers_of_one_name_share_its_messages(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            readers = [await engine.consume("feed", NEXT) for _ in range(2)]
            await publish(engine, *range(20), topic=NEXT)
            batches = [await reader.batch() for reader in readers]

            assert sorted(one.envelope.payload for batch in batches for one in batch) == list(range(20))
            assert all(len(batch) >= 5 for batch in batches)
            for reader in readers:
                await reader.close()

    run(story())


def test_what_one_reader_did_not_acknowledge_goes_to_the_other(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            first = await engine.consume("feed", NEXT)
            await publish(engine, 1, 2, topic=NEXT)
            (one, two) = await first.batch()
            one.ack()
            second = await engine.consume("feed", NEXT)

            await first.close()
            two.ack()
            (again,) = await second.batch()

            assert (again.envelope.payload, again.envelope.attempt) == (2, 2)
            again.ack()
            await second.close()

    run(story())


def test_a_reader_goes_on_where_the_last_one_was(town: Town) -> None:
    async def story() -> None:
        seen: list[Any] = []
        for life in range(3):
            async with town.engine() as engine, await engine.consume("feed", NEXT, start="first") as reader:
                await publish(engine, f"{life}a", f"{life}b", topic=NEXT)
                while not seen or seen[-1] != f"{life}b":
                    for message in await reader.batch(1):
                        seen.append(message.envelope.payload)
                        message.ack()

        assert seen == ["0a", "0b", "1a", "1b", "2a", "2b"]

    run(story())


def test_a_reader_may_begin_with_the_first_message_kept(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine:
            await publish(engine, 1, 2)
            async with await engine.consume("audit", "**", start="first") as reader:
                assert [one.envelope.payload for one in await reader.batch()] == [1, 2]

    run(story())


def test_a_reader_has_no_more_than_its_window(town: Town) -> None:
    async def story() -> None:
        delivery = Delivery.reliable_exclusive(window=1)
        async with town.engine() as engine, await engine.consume("feed", NEXT, delivery=delivery) as reader:
            await publish(engine, 1, 2, 3, topic=NEXT)
            sizes = []
            for _ in range(3):
                batch = await reader.batch()
                await turns()
                sizes.append(len(batch))
                batch[0].ack()

            assert sizes == [1, 1, 1]

    run(story())


def test_a_dispatchers_own_subscription_is_not_for_readers(town: Town) -> None:
    async def story() -> None:
        async with town.engine(Recorder()) as engine:
            with pytest.raises(InvalidParameter, match="'billing'"):
                await engine.consume("billing")
            with pytest.raises(InvalidParameter, match="name"):
                await engine.consume("")

    run(story())


def test_a_subscription_can_be_replayed_to_its_readers(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine, await engine.consume("feed", NEXT) as reader:
            await publish(engine, 1, 2, topic=NEXT)
            for message in await reader.batch():
                message.ack()

            await engine.journal.replay("feed", "first")
            again = await reader.batch()

            assert [one.envelope.payload for one in again] == [1, 2]

    run(story())


def test_after_a_replay_a_reader_that_closes_gives_back_what_it_had(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            first = await engine.consume("feed", NEXT)
            await publish(engine, 1, 2, topic=NEXT)
            await first.batch()
            await engine.journal.replay("feed", "first")
            assert len(await first.batch()) == 2

            await first.close()
            second = await engine.consume("feed", NEXT)
            async with asyncio.timeout(0.5):
                again = await second.batch()

            assert [one.envelope.payload for one in again] == [1, 2]
            await second.close()

    run(story())


def test_a_reader_may_come_while_the_last_one_is_closing(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            first = await engine.consume("feed", NEXT)
            await publish(engine, 1, topic=NEXT)
            for message in await first.batch():
                message.ack()

            _, second = await asyncio.gather(first.close(), engine.consume("feed", NEXT))
            (receipt,) = await publish(engine, 2, topic=NEXT)
            async with asyncio.timeout(0.5):
                payloads = [one.envelope.payload for one in await second.batch()]

            assert (receipt.status, payloads) == (DispatchStatus.ROUTED, [2])
            await second.close()

    run(story())


def test_two_readers_may_come_at_the_same_time(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            town.journal.turns = 3
            readers = await asyncio.gather(*(engine.consume("feed", NEXT) for _ in range(2)))
            await publish(engine, *range(10), topic=NEXT)
            await turns(100)

            payloads = [one.envelope.payload for reader in readers for one in list(reader._waiting)]

            assert sorted(payloads) == list(range(10))

    run(story())


def test_who_waits_for_a_message_is_told_when_the_engine_stops(town: Town) -> None:
    async def story() -> None:
        engine = town.engine()
        engine.freeze()
        await engine.start()
        reader = await engine.consume("feed", NEXT)
        reading = asyncio.ensure_future(reader.batch())
        await turns()

        await engine.stop()
        await turns()
        ended = reading.done()
        reading.cancel()

        assert ended

    run(story())


def test_an_engine_does_not_wait_for_what_nobody_has_taken_from_a_reader(town: Town) -> None:
    async def story() -> None:
        engine = town.engine()
        engine.freeze()
        await engine.start()
        reader = await engine.consume("feed", NEXT)
        await publish(engine, *range(5), topic=NEXT)
        (message,) = await reader.batch(1)
        message.ack()

        stopping = asyncio.ensure_future(engine.stop(1))
        await turns(200)
        ended = stopping.done()
        await stopping

        assert ended

    run(story())


def test_a_reader_that_could_not_begin_leaves_nothing(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine:
            with pytest.raises(InvalidParameter, match="start"):
                await engine.consume("feed", NEXT, start="yesterday")

            (receipt,) = await publish(engine, 1, topic=NEXT)

            assert receipt.status is DispatchStatus.NO_DISPATCHER

    run(story())


def test_readers_of_one_name_want_the_same(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine, await engine.consume("feed", NEXT):
            with pytest.raises(InvalidParameter, match="feed"):
                await engine.consume("feed", NOBODYS)

    run(story())


def test_readers_may_close_while_the_engine_stops(town: Town) -> None:
    async def story() -> None:
        town.journal.turns = 3
        engine = town.engine()
        engine.freeze()
        await engine.start()
        readers = [await engine.consume(name, NEXT) for name in "abcd"]

        await asyncio.gather(readers[0].close(), readers[3].close(), engine.stop(), *(one.close() for one in readers))

        assert town.journal.closes == 1

    run(story())


def test_a_word_is_for_the_delivery_that_it_was_given_for(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine, await engine.consume("feed", NEXT) as reader:
            await publish(engine, 1, topic=NEXT)
            (first,) = await reader.batch()
            first.nack(delay_seconds=0)
            await until(lambda: reader._waiting)

            first.ack()
            before = lag(engine, "feed")
            (second,) = await reader.batch()
            second.ack()

            assert (before, lag(engine, "feed"), second.envelope.attempt) == (1, 0, 2)

    run(story())


def test_a_late_word_does_not_disturb_the_end(town: Town) -> None:
    async def story() -> None:
        engine = town.engine()
        engine.freeze()
        await engine.start()
        reader = await engine.consume("feed", NEXT)
        await publish(engine, 1, topic=NEXT)
        (first,) = await reader.batch()
        first.nack(delay_seconds=0)
        await until(lambda: reader._waiting)
        first.ack()

        await engine.stop()

        assert town.journal.closes == 1

    run(story())


def test_what_was_read_before_a_replay_says_nothing_of_what_comes_after_it(town: Town) -> None:
    async def story() -> None:
        async with town.engine() as engine, await engine.consume("feed", NEXT) as reader:
            await publish(engine, 1, topic=NEXT)
            (before,) = await reader.batch()
            await engine.journal.replay("feed", "first")
            await until(lambda: reader._waiting)

            before.ack()

            assert lag(engine, "feed") == 1
            (after,) = await reader.batch()
            after.ack()
            assert lag(engine, "feed") == 0

    run(story())


@pytest.mark.parametrize("poison", [{(1, 2): "a"}, {frozenset({1}): "a"}], ids=["tuple", "frozenset"])
def test_one_message_never_stops_a_subscription(town: Town, poison: Any) -> None:
    async def story() -> None:
        # Whatever breaks here need not be complained of in the middle of another test.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        handler = Recorder()
        async with town.engine(handler) as engine, await engine.consume("feed", "**") as reader:
            await publish(engine, poison)
            await publish(engine, "good")
            read: list[Any] = []
            async with asyncio.timeout(0.5):
                while "good" not in read or "good" not in handler.payloads:
                    for message in await reader.batch():
                        read.append(message.envelope.payload)
                        message.ack()
                await until(lambda: lag(engine) == 0)

    run(story())


def test_every_message_is_delivered_once_the_journal_is_slow(town: Town) -> None:
    async def story() -> None:
        town.journal.turns = 3
        handler = Recorder()
        async with town.engine(handler, journal={"cache_bytes": 0}, replicas=2) as engine:
            await asyncio.gather(*(publish(engine, number) for number in range(40)))
            await publish(engine, *range(40, 60))
            await until(lambda: lag(engine) == 0)

        assert sorted(handler.payloads) == list(range(60))

    run(story())


def ids(envelopes: list[Envelope[Any]]) -> list[UUID]:
    return [envelope.message_id for envelope in envelopes]


def test_whatever_fails_how_often_it_likes_nothing_is_lost(town: Town) -> None:
    async def story() -> None:
        sent: list[UUID] = []
        done: set[UUID] = set()
        count = 0

        async def handler(envelope: Envelope[Any]) -> None:
            nonlocal count
            count += 1
            await turns(count % 3)
            if count % 4 == 0:
                raise OSError("no disk")
            done.add(envelope.message_id)

        for _ in range(3):
            engine = town.engine(handler, retry=RetrySettings(tries=2, first_delay_seconds=0))
            async with engine:
                envelopes = [Envelope(number) for number in range(20)]
                sent += ids(envelopes)
                await engine.publish_many([(TOPIC, envelope) for envelope in envelopes], durable=True)
                await turns(count % 7)
                await engine.stop(0)
        async with town.engine(handler, retry=AT_ONCE) as engine:
            await until(lambda: lag(engine) == 0)
            buried = {one.envelope.message_id async for one in engine.journal.letters.find()}

        assert set(sent) == done | buried

    run(story())
