import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from raydispatch.bus.lane import Lane
from raydispatch.delivery.backpressure import Verdict
from raydispatch.dispatch.clock import SystemClock
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import BackpressureSettings, BackpressureStrategy, EngineSettings

TOPIC = "dev.order.events.v1"
LONG = 3_600.0


class Road:
    """A lane whose handlers wait at a gate."""

    def __init__(self, **settings: Any) -> None:
        self.begun: list[Any] = []
        self.told: list[Any] = []
        self.dropped: list[Any] = []
        self.abandoned: list[Any] = []
        self.pressure: list[bool] = []
        self.gate = asyncio.Event()
        self.lane = Lane(
            EngineSettings(**{"batch_wait_seconds": 0, **settings}),
            SystemClock(),
            self.deliver,
            self.told.append,
            lambda topic, envelope: self.dropped.append(envelope.payload),
            lambda topic, envelope: self.abandoned.append(envelope.payload),
            self.pressure.append,
        )

    async def deliver(self, topic: str, envelope: Envelope[Any]) -> object:
        self.begun.append(envelope.payload)
        await self.gate.wait()
        return envelope.payload

    def publish(self, *payloads: object) -> list[Verdict]:
        return [self.lane.queue.offer((TOPIC, Envelope(payload))) for payload in payloads]

    def send_on(self, *payloads: object) -> bool:
        return self.lane.outbox.offer([Envelope(payload, topic=TOPIC) for payload in payloads])


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


def test_outputs_have_room_however_full_the_queue_is() -> None:
    async def story() -> None:
        road = Road(
            backpressure=BackpressureSettings(capacity=1), outbox_capacity=2, batch_size=1, max_concurrent_deliveries=1
        )
        road.publish(1)
        await until(lambda: road.begun == [1])

        verdicts = road.publish(2, 3)
        accepted = road.send_on("a", "b")
        await until(lambda: road.begun == [1, "a"])

        assert verdicts == [Verdict.ACCEPTED, Verdict.QUEUE_FULL]
        assert accepted
        assert not road.send_on("c", "d")
        await road.lane.stop(0)

    run(story())


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_only_one_strategy_waits(strategy: BackpressureStrategy) -> None:
    async def story() -> None:
        road = Road(backpressure=BackpressureSettings(strategy=strategy))

        assert road.lane.waits is (strategy is BackpressureStrategy.WAIT)

    run(story())


def test_drops_and_pressure_are_told() -> None:
    async def story() -> None:
        settings = BackpressureSettings(
            strategy=BackpressureStrategy.DROP_OLDEST, capacity=2, high_mark=1.0, low_mark=0.0
        )
        road = Road(backpressure=settings, batch_wait_seconds=LONG)

        road.publish(1, 2, 3)
        road.gate.set()
        await road.lane.drained()

        assert (road.dropped, road.told, road.pressure) == ([1], [2, 3], [True, False])

    run(story())


def test_drained_means_outputs_of_outputs_too() -> None:
    async def story() -> None:
        road = Road()

        async def chain(topic: str, envelope: Envelope[Any]) -> object:
            await asyncio.sleep(0)
            if envelope.payload:
                assert road.send_on(envelope.payload - 1)
            return envelope.payload

        road.lane._events._deliver = road.lane._outputs._deliver = chain
        road.publish(3)
        await road.lane.drained()

        assert road.told == [3, 2, 1, 0]

    run(story())


def test_a_stop_lets_everything_end_that_ends_in_time() -> None:
    async def story() -> None:
        road = Road(batch_wait_seconds=LONG)
        road.publish(1)
        road.send_on("a")

        stopping = asyncio.create_task(road.lane.stop(LONG))
        await until(lambda: len(road.begun) == 2)
        road.gate.set()
        await stopping

        assert (sorted(map(str, road.told)), road.abandoned) == (["1", "a"], [])

    run(story())


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_at_the_deadline_the_rest_is_abandoned(seconds: float) -> None:
    async def story() -> None:
        road = Road(batch_size=1, max_concurrent_deliveries=1)
        road.publish(1, 2, 3)
        road.send_on("a", "b")
        await until(lambda: len(road.begun) == 2)

        await road.lane.stop(seconds)

        assert (road.told, sorted(map(str, road.abandoned))) == ([], ["1", "2", "3", "a", "b"])

    run(story())


def test_while_it_stops_nothing_new_comes_in_but_outputs_do() -> None:
    async def story() -> None:
        road = Road()
        road.publish(1)
        await until(lambda: road.begun)

        stopping = asyncio.create_task(road.lane.stop(LONG))
        await asyncio.sleep(0)
        verdicts = road.publish(2)
        accepted = road.send_on("a")
        road.gate.set()
        await stopping

        assert verdicts == [Verdict.CLOSED]
        assert accepted
        assert road.told == [1, "a"]

    run(story())


def test_a_stop_that_is_cancelled_abandons_the_rest_at_once() -> None:
    async def story() -> None:
        road = Road()
        road.publish(1)
        road.send_on("a")
        await until(lambda: len(road.begun) == 2)

        stopping = asyncio.create_task(road.lane.stop(LONG))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])

        assert stopping.cancelled()
        assert sorted(map(str, road.abandoned)) == ["1", "a"]

    run(story())


def test_a_stop_that_is_cancelled_twice_leaves_nothing_running() -> None:
    async def story() -> None:
        road = Road()
        road.publish(1)
        road.send_on("a")
        await until(lambda: len(road.begun) == 2)

        stopping = asyncio.create_task(road.lane.stop(LONG))
        for _ in range(2):
            await asyncio.sleep(0)
            stopping.cancel()
        await until(lambda: len(asyncio.all_tasks()) == 1)

        assert sorted(map(str, road.abandoned)) == ["1", "a"]

    asyncio.run(story())


def test_what_a_closed_loop_has_left_can_still_be_abandoned() -> None:
    loop = asyncio.new_event_loop()

    async def story() -> Road:
        road = Road(batch_wait_seconds=LONG)
        road.publish(1)
        return road

    road = loop.run_until_complete(story())
    pending = asyncio.all_tasks(loop)
    loop.close()
    road.lane.abandon_all()

    assert road.abandoned == [1]
    for task in pending:
        # Or asyncio complains of tasks that were destroyed.
        task.get_coro().close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
