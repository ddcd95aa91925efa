import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raydispatch.bus.announcements import SESSION_ENDED, SESSION_STARTED, SessionEnded, SessionStarted
from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.session import Session
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Reply
from raydispatch.errors import DuplicateRegistration, ErrorCode, InvalidParameter, InvalidState, InvalidTable
from raydispatch.messages.envelope import SESSION_HEADER, Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.settings import BackpressureSettings, BackpressureStrategy, EngineSettings, RetrySettings

T = TypeVar("T")

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND
TOPIC, NEXT, TAKE = "dev.order.events.v1", "dev.invoice.events.v1", "dev.stock.commands.take"


class Shop:
    """An engine and the marks that its handlers leave."""

    def __init__(self, **settings: Any) -> None:
        self.marks: list[str] = []
        self.results: list[DispatchResult] = []
        self.engine = DispatchEngine(
            settings=EngineSettings(**{"batch_wait_seconds": 0, **settings}), on_result=self.results.append
        )
        self.engine.dispatcher("orders", topics=TOPIC, category=EVENT)(self.marking("engine"))
        self.engine.dispatcher("stock", topics=TAKE, category=COMMAND)(self.marking("engine"))
        self.engine.freeze()

    def marking(self, name: str, output: Any = None) -> Any:
        async def handle(envelope: Envelope[Any]) -> Any:
            self.marks.append(name)
            return output if output is not None else Reply(name) if envelope.topic == TAKE else None

        return handle

    def add(self, session: Session, name: str, topic: str = TOPIC, **options: Any) -> None:
        category = MessageCategory.from_topic(topic)
        assert category is not None
        dispatcher_id = options.pop("dispatcher_id", name)
        handler = options.pop("handler", None) or self.marking(name, options.pop("output", None))
        chosen = {"retry": RetrySettings(tries=1), **options}
        session.dispatcher(dispatcher_id, topics=topic, category=category, **chosen)(handler)


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


# Who gets what


def test_the_sessions_dispatcher_wins_a_command() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE)

            inside = await session.execute(TAKE, Envelope("tea"))
            outside = await shop.engine.execute(TAKE, Envelope("tea"))

        assert (inside.reply, outside.reply) == (Reply("own"), Reply("engine"))
        assert len(inside.outcomes) == 1

    run(story())


def test_a_command_that_the_session_does_not_take_goes_to_the_engines_dispatcher() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE, message_types={"Other"})

            result = await session.execute(TAKE, Envelope("tea"))

        assert result.reply == Reply("engine")

    run(story())


def test_both_get_an_event() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own")

            result = await session.dispatch(TOPIC, Envelope(1))

        assert shop.marks == ["own", "engine"]
        assert [outcome.dispatcher_id for outcome in result.outcomes] == ["own", "orders"]

    run(story())


@pytest.mark.parametrize(
    ("priority", "order"), [(1, ["own", "engine"]), (0, ["own", "engine"]), (-1, ["engine", "own"])]
)
def test_priorities_count_across_both_tables(priority: int, order: list[str]) -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", priority=priority)
            await session.dispatch(TOPIC, Envelope(1))

        assert shop.marks == order

    run(story())


def test_an_event_that_only_the_session_takes_is_taken() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", NEXT)

            inside = await session.dispatch(NEXT, Envelope(1))
            outside = await shop.engine.dispatch(NEXT, Envelope(1))

        assert inside.is_successful()
        assert outside.status is DispatchStatus.NO_DISPATCHER

    run(story())


def test_every_verb_stays_in_the_session() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE)

            await session.dispatch(TAKE, Envelope(1))
            await session.execute(TAKE, Envelope(1))
            await session.request(TAKE, Envelope(1))
            await session.publish(TAKE, Envelope(1))
            await shop.engine.drain()

        assert shop.marks == ["own"] * 4

    run(story())


def test_outputs_of_a_sessions_messages_stay_in_the_session() -> None:
    async def story() -> None:
        shop = Shop()
        seen: list[Envelope[Any]] = []

        async def watch(envelope: Envelope[Any]) -> None:
            seen.append(envelope)

        async with shop.engine.session("job-1") as session:
            shop.add(session, "topic", output=NEXT)
            shop.add(session, "envelope", output=Envelope(2, topic=NEXT))
            shop.add(session, "watch", NEXT, handler=watch)
            await session.publish(TOPIC, Envelope(1))
            await shop.engine.drain()

        assert [envelope.session_id for envelope in seen] == ["job-1"] * 2

    run(story())


def test_dispatchers_of_one_id_in_the_session_and_the_engine_make_outputs_of_their_own() -> None:
    async def story() -> None:
        shop = Shop()
        engine = DispatchEngine()
        engine.dispatcher("billing", topics=TOPIC, category=EVENT)(shop.marking("engine", NEXT))
        engine.freeze()
        listener = engine.subscribe(NEXT)
        async with engine.session("job-1") as session:
            shop.add(session, "own", dispatcher_id="billing", output=NEXT)
            await session.dispatch(TOPIC, Envelope(1))
        listener.unsubscribe()

        assert len({envelope.message_id async for envelope in listener}) == 2

    run(story())


# Isolation


def test_sessions_at_the_same_time_do_not_see_each_other() -> None:
    async def job(shop: Shop, name: str, all_open: asyncio.Barrier) -> list[object]:
        async with shop.engine.session(name) as session:
            shop.add(session, name, TAKE, dispatcher_id="same")
            await all_open.wait()
            return [(await session.execute(TAKE, Envelope(1))).reply for _ in range(3)]

    async def story() -> None:
        names = [f"job-{number}" for number in range(5)]
        shop, all_open = Shop(), asyncio.Barrier(5)

        replies = await asyncio.gather(*(job(shop, name, all_open) for name in names))

        assert replies == [[Reply(name)] * 3 for name in names]

    run(story())


def test_a_session_id_is_taken_until_its_session_ends() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE)
            with pytest.raises(DuplicateRegistration):
                async with shop.engine.session("job-1"):
                    pass
            still = await session.execute(TAKE, Envelope(1))
        async with shop.engine.session("job-1") as another:
            after = await another.execute(TAKE, Envelope(1))

        assert (still.reply, after.reply) == (Reply("own"), Reply("engine"))

    run(story())


def test_a_session_is_not_entered_twice_at_once_but_may_be_used_again() -> None:
    async def story() -> None:
        shop = Shop()
        session = shop.engine.session("job-1")
        async with session:
            shop.add(session, "first", TAKE)
            with pytest.raises(DuplicateRegistration):
                await session.__aenter__()
            first = await session.execute(TAKE, Envelope(1))
        async with session:
            bare = await session.execute(TAKE, Envelope(1))
            shop.add(session, "first", TAKE)
            again = await session.execute(TAKE, Envelope(1))

        assert [result.reply for result in (first, bare, again)] == [Reply("first"), Reply("engine"), Reply("first")]

    run(story())


@pytest.mark.parametrize("session_id", ["", " ", "x" * 201, None])
def test_a_session_needs_an_id(session_id: Any) -> None:
    with pytest.raises(InvalidParameter, match="session_id"):
        Shop().engine.session(session_id)


def test_a_session_needs_a_frozen_engine() -> None:
    with pytest.raises(InvalidState, match="freeze"):
        DispatchEngine().session("job-1")


# Registering


def test_outside_of_its_block_a_session_takes_nothing() -> None:
    async def story() -> None:
        shop = Shop()
        session = shop.engine.session("job-1")
        with pytest.raises(InvalidState):
            shop.add(session, "early")
        async with session:
            pass
        with pytest.raises(InvalidState):
            shop.add(session, "late")
        for send in (session.dispatch, session.publish, session.execute, session.request):
            with pytest.raises(InvalidState, match="ended"):
                await send(TAKE, Envelope(1))

    run(story())


def test_a_route_may_come_before_its_dispatcher_and_leads_nowhere_until_then() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            session.register_route(
                DispatchRoute(route_id="r", topic_pattern=TAKE, message_category=COMMAND, dispatcher_id="own")
            )
            before = await session.execute(TAKE, Envelope(1))
            session.register_dispatcher("own", shop.marking("own"), COMMAND)
            after = await session.execute(TAKE, Envelope(1))

        assert (before.reply, after.reply) == (Reply("engine"), Reply("own"))

    run(story())


def test_a_registration_that_is_refused_changes_nothing() -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE)
            with pytest.raises(DuplicateRegistration):
                shop.add(session, "other", TAKE, dispatcher_id="own")
            with pytest.raises(InvalidTable):
                session.register_route(
                    DispatchRoute(route_id="r", topic_pattern=TOPIC, message_category=EVENT, dispatcher_id="own")
                )
            shop.add(session, "one more")

            result = await session.execute(TAKE, Envelope(1))

        assert result.reply == Reply("own")

    run(story())


def test_only_envelopes_are_sent_in_a_session() -> None:
    async def story() -> None:
        nothing: Any = None
        async with Shop().engine.session("job-1") as session:
            with pytest.raises(InvalidParameter, match="Envelope"):
                await session.dispatch(TOPIC, nothing)

    run(story())


# The end


class Failure(Exception):
    pass


def test_an_error_ends_the_session_and_goes_on() -> None:
    async def story() -> None:
        shop = Shop()

        async def job() -> None:
            async with shop.engine.session("job-1") as session:
                shop.add(session, "own", TAKE)
                raise Failure

        with pytest.raises(Failure):
            await job()
        result = await shop.engine.execute(TAKE, Envelope(1, headers={SESSION_HEADER: "job-1"}))

        assert result.reply == Reply("engine")

    run(story())


def test_a_session_ended_while_its_dispatcher_runs_lets_it_end_and_then_stops_it() -> None:
    async def story() -> None:
        shop, gate = Shop(), asyncio.Event()

        class Connected:
            async def handle(self, envelope: Envelope[Any]) -> Reply:
                shop.marks.append("begun")
                await gate.wait()
                shop.marks.append("ended")
                return Reply("in time")

            def stop(self) -> None:
                shop.marks.append("stopped")

        async def job() -> asyncio.Task[DispatchResult]:
            async with shop.engine.session("job-1") as session:
                shop.add(session, "own", TAKE, handler=Connected)
                running = asyncio.create_task(session.execute(TAKE, Envelope(1)))
                await until(lambda: shop.marks)
            return running

        ending = asyncio.create_task(job())
        await until(lambda: shop.marks == ["begun"] and not shop.engine._frozen().overlays)
        meanwhile = await shop.engine.execute(TAKE, Envelope(1, headers={SESSION_HEADER: "job-1"}))
        gate.set()
        result = await (await ending)

        assert (result.status, result.reply) == (DispatchStatus.SUCCESS, Reply("in time"))
        assert meanwhile.reply == Reply("engine")
        assert shop.marks == ["begun", "engine", "ended", "stopped"]

    run(story())


def test_a_dispatcher_that_hangs_holds_up_the_end_no_longer_than_allowed() -> None:
    async def story() -> None:
        shop = Shop(stop_seconds=0.01)

        async def hanging(envelope: Envelope[Any]) -> None:
            shop.marks.append("begun")
            await asyncio.Event().wait()

        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", TAKE, handler=hanging)
            running = asyncio.create_task(session.execute(TAKE, Envelope(1)))
            await until(lambda: shop.marks)

        running.cancel()

    run(story())


def test_a_session_that_is_cancelled_at_its_end_is_gone_all_the_same() -> None:
    async def story() -> None:
        shop = Shop()

        async def hanging(envelope: Envelope[Any]) -> None:
            shop.marks.append("begun")
            await asyncio.Event().wait()

        async def job() -> None:
            async with shop.engine.session("job-1") as session:
                shop.add(session, "own", TAKE, handler=hanging)
                running.append(asyncio.create_task(session.execute(TAKE, Envelope(1))))
                await until(lambda: shop.marks)

        running: list[asyncio.Task[DispatchResult]] = []
        listener = shop.engine.subscribe(SESSION_ENDED)
        ending = asyncio.create_task(job())
        await until(lambda: shop.marks and not shop.engine._frozen().overlays)
        ending.cancel()
        await asyncio.wait([ending])
        async with shop.engine.session("job-1"):
            pass

        assert ending.cancelled()
        assert listener.pending == 2
        running[0].cancel()

    run(story())


def test_a_handler_that_fails_to_stop_does_not_hide_the_error_that_ended_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        shop = Shop()
        stopped: list[str] = []

        class Bad:
            async def handle(self, envelope: Envelope[Any]) -> None: ...

            async def stop(self) -> None:
                raise OSError("password=hunter2")

        class Good:
            async def handle(self, envelope: Envelope[Any]) -> None: ...

            async def stop(self) -> None:
                stopped.append("good")

        async def job() -> None:
            async with shop.engine.session("job-1") as session:
                shop.add(session, "bad", handler=Bad, replicas=2)
                shop.add(session, "good", handler=Good)
                for _ in range(10):
                    await session.dispatch(TOPIC, Envelope(1))
                raise Failure

        with pytest.raises(Failure):
            await job()

        assert stopped == ["good"]

    run(story())

    assert "stop failed" in caplog.messages
    assert "hunter2" not in str([record.__dict__ for record in caplog.records])


def test_a_message_still_in_the_queue_when_its_session_ends_ends_with_a_word() -> None:
    async def story() -> None:
        shop = Shop(batch_wait_seconds=3_600, batch_size=100)
        async with shop.engine.session("job-1") as session:
            shop.add(session, "own", NEXT)
            receipt = await session.publish(NEXT, Envelope(1))
        await shop.engine.drain()

        assert receipt.status is DispatchStatus.ROUTED
        assert [result.error_code for result in shop.results] == [ErrorCode.NO_DISPATCHER]

    run(story())


# Announcements


@pytest.mark.parametrize("error", [None, Failure("no"), asyncio.CancelledError()], ids=repr)
def test_a_session_is_announced_when_it_starts_and_when_it_ends(error: BaseException | None) -> None:
    async def story() -> None:
        shop = Shop()
        listener = shop.engine.subscribe("raydispatch.session.**")
        try:
            async with shop.engine.session("job-1"):
                if error is not None:
                    raise error
        except (Failure, asyncio.CancelledError):
            pass
        listener.unsubscribe()
        news = [(envelope.topic, envelope.payload) async for envelope in listener]

        assert news == [
            (SESSION_STARTED, SessionStarted("job-1")),
            (SESSION_ENDED, SessionEnded("job-1", type(error).__name__ if error else None)),
        ]

    run(story())


def test_a_full_queue_holds_up_no_session() -> None:
    async def story() -> None:
        gate = asyncio.Event()
        engine = DispatchEngine(
            settings=EngineSettings(
                backpressure=BackpressureSettings(strategy=BackpressureStrategy.WAIT, capacity=1),
                batch_size=1,
                batch_wait_seconds=0,
                max_concurrent_deliveries=1,
            )
        )

        @engine.dispatcher("audit", topics=[TOPIC, "raydispatch.**"], category=EVENT)
        async def audit(envelope: Envelope[Any]) -> None:
            await gate.wait()

        engine.freeze()
        for _ in range(3):
            await engine.publish(TOPIC, Envelope(1))
        async with engine.session("job-1"):
            pass
        gate.set()
        await engine.drain()

        assert engine.get_structured_metrics().statuses == {DispatchStatus.SUCCESS: 5}

    run(story())


def test_overlapping_commands_of_a_session_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        shop = Shop()
        async with shop.engine.session("job-1") as session:
            shop.add(session, "a", "dev.*.commands.take")
            shop.add(session, "b", "*.stock.commands.take")

    with caplog.at_level(logging.WARNING, logger="raydispatch"):
        run(story())

    assert caplog.messages == ["command routes overlap"]


def test_a_session_that_outlives_its_engine_ends_without_starting_anything_again() -> None:
    async def story() -> None:
        seen: list[str] = []
        engine = DispatchEngine()

        @engine.dispatcher("audit", topics="raydispatch.**", category=EVENT)
        async def audit(envelope: Envelope[Any]) -> None:
            seen.append(envelope.message_type)

        engine.freeze()
        async with engine.session("job-1"):
            await engine.stop()

        assert seen == ["SessionStarted"]
        assert len(asyncio.all_tasks()) == 2
        assert engine.get_structured_metrics().statuses[DispatchStatus.REJECTED] == 1

    run(story())
