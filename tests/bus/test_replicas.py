import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.endpoints import EndpointState
from raydispatch.dispatch.outcome import DispatchStatus, Reply
from raydispatch.errors import (
    DuplicateRegistration,
    EndpointLost,
    ErrorCode,
    InvalidParameter,
    InvalidState,
    NotRegistered,
)
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.settings import EngineSettings, RetrySettings

T = TypeVar("T")

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND
TOPIC = "dev.order.commands.v1"
INTERVAL = 5.0


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class Replica:
    """Makes handlers that answer with their name, until they are lost."""

    def __init__(self) -> None:
        self.lives: list[str] = []
        self.lost: set[str] = set()
        self.sick: set[str] = set()
        self.built = 0

    def named(self, name: str | None = None) -> type:
        shared = self

        class Named:
            def __init__(self) -> None:
                shared.built += 1
                self.name = name or f"number {shared.built}"

            async def start(self) -> None:
                shared.lives.append(f"{self.name} starts")

            async def handle(self, envelope: Envelope[Any]) -> Reply:
                if self.name in shared.lost:
                    raise EndpointLost
                return Reply(self.name)

            async def stop(self) -> None:
                shared.lives.append(f"{self.name} stops")

            async def health(self) -> bool:
                return self.name not in shared.sick

        return Named


def make_engine(handler: Any, clock: Clock | None = None, **options: Any) -> DispatchEngine:
    engine = DispatchEngine(settings=EngineSettings(health_interval_seconds=INTERVAL, stop_seconds=0.05), clock=clock)
    chosen = {"retry": RetrySettings(tries=1), "breaker": None, **options}
    engine.dispatcher("billing", topics=TOPIC, category=COMMAND, **chosen)(handler)
    engine.freeze()
    return engine


async def who_answers(engine: DispatchEngine, times: int = 50) -> set[str]:
    results = [await engine.execute(TOPIC, Envelope(1)) for _ in range(times)]
    return {result.reply.payload for result in results if result.reply}


def states(engine: DispatchEngine) -> dict[str, EndpointState]:
    return {info.endpoint_id: info.state for info in engine.endpoints.find()}


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


# Joining, finding, leaving


def test_a_dispatcher_has_as_many_endpoints_as_replicas() -> None:
    engine = make_engine(Replica().named(), replicas=3)

    found = engine.endpoints.find("billing")

    assert [(info.endpoint_id, info.dispatcher_id, info.state) for info in found] == [
        (f"billing-{number}", "billing", EndpointState.HEALTHY) for number in (1, 2, 3)
    ]
    assert engine.endpoints.find() == found


def test_one_that_joins_shares_the_messages_and_one_that_leaves_gets_none() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))

        before = await who_answers(engine)
        await engine.endpoints.join("billing", replica.named("second"), "billing-eu")
        shared = await who_answers(engine)
        await engine.endpoints.leave("billing", "billing-1")
        after = await who_answers(engine)

        assert (before, shared, after) == ({"first"}, {"first", "second"}, {"second"})
        assert replica.lives == ["first starts", "second starts", "first stops"]
        assert list(states(engine)) == ["billing-eu"]

    run(story())


def test_one_that_leaves_ends_its_messages_first() -> None:
    async def story() -> None:
        gate, seen = asyncio.Event(), []

        class Slow:
            async def handle(self, envelope: Envelope[Any]) -> Reply:
                seen.append("begun")
                await gate.wait()
                return Reply("done")

            def stop(self) -> None:
                seen.append("stopped")

        engine = DispatchEngine()
        engine.dispatcher("billing", topics=TOPIC, category=COMMAND)(Slow)
        engine.freeze()
        running = asyncio.create_task(engine.execute(TOPIC, Envelope(1)))
        await until(lambda: seen)
        leaving = asyncio.create_task(engine.endpoints.leave("billing", "billing-1"))
        await until(lambda: states(engine) == {"billing-1": EndpointState.LEAVING})
        order = list(seen)
        gate.set()
        await leaving

        assert (await running).reply == Reply("done")
        assert (order, seen) == (["begun"], ["begun", "stopped"])
        assert states(engine) == {}

    run(story())


def test_one_that_hangs_is_stopped_when_the_time_is_up() -> None:
    async def story() -> None:
        seen: list[str] = []

        class Hanging:
            async def handle(self, envelope: Envelope[Any]) -> None:
                seen.append("begun")
                await asyncio.Event().wait()

            def stop(self) -> None:
                seen.append("stopped")

        engine = make_engine(Hanging)
        running = asyncio.create_task(engine.execute(TOPIC, Envelope(1)))
        await until(lambda: seen)

        await engine.endpoints.leave("billing", "billing-1")

        assert seen == ["begun", "stopped"]
        running.cancel()

    run(story())


def test_an_endpoint_id_is_taken_once_and_what_was_started_in_vain_is_stopped() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))

        with pytest.raises(DuplicateRegistration):
            await engine.endpoints.join("billing", replica.named("second"), "billing-1")

        assert replica.lives == ["second starts", "second stops"]
        assert await who_answers(engine) == {"first"}

    run(story())


def test_one_that_does_not_start_does_not_join() -> None:
    async def story() -> None:
        class Broken:
            def start(self) -> None:
                raise OSError("down")

            def handle(self, envelope: Envelope[Any]) -> None: ...

        engine = make_engine(Replica().named("first"))

        with pytest.raises(OSError, match="down"):
            await engine.endpoints.join("billing", Broken, "billing-2")

        assert list(states(engine)) == ["billing-1"]

    run(story())


def test_what_nobody_registered_is_not_there() -> None:
    async def story() -> None:
        endpoints = make_engine(Replica().named()).endpoints

        with pytest.raises(NotRegistered, match="dispatcher 'nobody'"):
            endpoints.find("nobody")
        with pytest.raises(NotRegistered, match="dispatcher 'nobody'"):
            await endpoints.join("nobody", Replica().named(), "x")
        with pytest.raises(NotRegistered, match="endpoint 'x'"):
            await endpoints.leave("billing", "x")
        with pytest.raises(InvalidParameter, match="endpoint_id"):
            await endpoints.join("billing", Replica().named(), " ")
        with pytest.raises(InvalidState):
            _ = DispatchEngine().endpoints

    run(story())


def test_without_endpoints_a_message_ends_in_a_clear_status() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))
        await engine.endpoints.leave("billing", "billing-1")

        alone = await engine.execute(TOPIC, Envelope(1))
        await engine.endpoints.join("billing", replica.named("second"), "billing-2")
        again = await engine.execute(TOPIC, Envelope(1))

        assert (alone.status, alone.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.NO_HEALTHY_ENDPOINT)
        assert again.reply == Reply("second")

    run(story())


def test_endpoints_join_and_leave_while_messages_flow_and_none_is_lost() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))

        async def churn() -> None:
            for number in range(20):
                await engine.endpoints.join("billing", replica.named(), f"extra-{number}")
                await asyncio.sleep(0)
                await engine.endpoints.leave("billing", f"extra-{number}")

        churning = asyncio.create_task(churn())
        results = []
        while not churning.done():
            results += await asyncio.gather(*(engine.execute(TOPIC, Envelope(1)) for _ in range(10)))
        await churning

        assert Counter(result.status for result in results) == {DispatchStatus.SUCCESS: len(results)}
        assert Counter(life.split()[-1] for life in replica.lives) == {"starts": 21, "stops": 20}

    run(story())


# Health


def test_one_that_is_lost_is_skipped_and_the_next_takes_the_message() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))
        await engine.endpoints.join("billing", replica.named("second"), "billing-2")
        replica.lost.add("first")

        answers = await who_answers(engine)

        assert answers == {"second"}
        assert states(engine) == {"billing-1": EndpointState.QUARANTINED, "billing-2": EndpointState.HEALTHY}
        assert engine.get_structured_metrics().statuses == {DispatchStatus.SUCCESS: 50}

    run(story())


def test_when_all_are_lost_messages_end_clearly_until_the_next_check_of_their_health() -> None:
    async def story() -> None:
        clock, replica = Clock(), Replica()
        engine = make_engine(replica.named("only"), clock)
        replica.lost.add("only")

        lost = await engine.execute(TOPIC, Envelope(1))
        replica.lost.clear()
        too_soon = await engine.execute(TOPIC, Envelope(1))
        clock.seconds += INTERVAL
        recovered = await engine.execute(TOPIC, Envelope(1))

        for result in (lost, too_soon):
            assert (result.status, result.error_code) == (
                DispatchStatus.DISPATCHER_ERROR,
                ErrorCode.NO_HEALTHY_ENDPOINT,
            )
        assert recovered.reply == Reply("only")

    run(story())


def test_one_that_says_it_is_not_well_gets_nothing_until_it_is() -> None:
    async def story() -> None:
        replica = Replica()
        engine = make_engine(replica.named("first"))
        await engine.endpoints.join("billing", replica.named("second"), "billing-2")
        await who_answers(engine)

        replica.sick.add("second")
        await engine.endpoints.check_health()
        sick = await who_answers(engine)
        replica.sick.clear()
        await engine.endpoints.check_health()
        well = await who_answers(engine)

        assert (sick, well) == ({"first"}, {"first", "second"})

    run(story())


def test_a_dispatcher_that_hangs_does_not_keep_the_others_from_being_asked() -> None:
    async def story() -> None:
        asked: list[str] = []

        def checked(name: str, hangs: bool) -> type:
            class Checked:
                async def handle(self, envelope: Envelope[Any]) -> None: ...

                async def health(self) -> bool:
                    asked.append(name)
                    if hangs:
                        await asyncio.Event().wait()
                    return True

            return Checked

        engine = DispatchEngine()
        engine.dispatcher("a", topics="a.events", category=EVENT)(checked("a", hangs=True))
        engine.dispatcher("b", topics="b.events", category=EVENT)(checked("b", hangs=False))
        engine.freeze()
        await engine.start()
        checking = asyncio.create_task(engine.endpoints.check_health())
        await until(lambda: asked == ["a", "b"])

        checking.cancel()
        await engine.stop()

    run(story())


def test_a_started_engine_watches_health_by_itself() -> None:
    async def story() -> None:
        replica, ticks = Replica(), asyncio.Queue[float]()

        class Ticking(Clock):
            async def sleep(self, seconds: float) -> None:
                assert seconds == INTERVAL
                await ticks.get()

        engine = make_engine(replica.named("only"), Ticking())
        for _ in range(2):
            async with engine:
                replica.sick.add("only")
                ticks.put_nowait(INTERVAL)
                await until(lambda: states(engine) == {"billing-1": EndpointState.QUARANTINED})
                replica.sick.clear()
                ticks.put_nowait(INTERVAL)
                await until(lambda: states(engine) == {"billing-1": EndpointState.HEALTHY})
        await until(lambda: len(asyncio.all_tasks()) == 2)

    run(story())


def test_one_that_does_not_start_is_passed_over() -> None:
    async def story() -> None:
        replica = Replica()
        starts: list[int] = []

        class Moody:
            def start(self) -> None:
                starts.append(1)
                raise OSError("down")

            def handle(self, envelope: Envelope[Any]) -> None: ...

        engine = make_engine(Moody)
        await engine.endpoints.join("billing", replica.named("second"), "billing-2")

        assert await who_answers(engine) == {"second"}
        assert len(starts) == 1

    run(story())
