import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from raydispatch.bus.intake import Intake, Message, delivering
from raydispatch.delivery.backpressure import BoundedQueue
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import BackpressureSettings

TOPIC = "dev.order.events.v1"
LONG = 3_600.0


class Desk:
    """An intake in front of a handler that waits at a gate, if it is told to."""

    def __init__(self, *, gated: bool = False, **options: Any) -> None:
        self.begun: list[Any] = []
        self.told: list[Any] = []
        self.abandoned: list[Any] = []
        self.gate = asyncio.Event()
        self.most = self._now = 0
        if not gated:
            self.gate.set()
        self.queue: BoundedQueue[Message] = BoundedQueue(BackpressureSettings(capacity=100))
        chosen: dict[str, Any] = {"batch_size": 2, "wait_seconds": 0, "concurrency": 10, **options}
        self.intake = Intake(self.queue, self.deliver, self.abandon, tell=self.told.append, **chosen)

    async def deliver(self, topic: str, envelope: Envelope[Any]) -> object:
        self.begun.append(envelope.payload)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await self.gate.wait()
        finally:
            self._now -= 1
        return envelope.payload

    def abandon(self, topic: str, envelope: Envelope[Any]) -> None:
        self.abandoned.append(envelope.payload)

    def bring(self, *payloads: object) -> None:
        assert self.queue.offer_all([(TOPIC, Envelope(payload)) for payload in payloads])

    async def end(self) -> None:
        self.intake.cancel()
        await self.intake.ended()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


# Batches


def test_a_full_batch_comes_at_once() -> None:
    async def story() -> None:
        desk = Desk(batch_size=2, wait_seconds=LONG)

        desk.bring(1, 2, 3)
        await until(lambda: len(desk.told) == 2)

        assert (desk.told, len(desk.queue)) == ([1, 2], 1)

    run(story())


def test_a_batch_that_is_not_full_comes_after_a_while() -> None:
    async def story() -> None:
        desk = Desk(batch_size=100, wait_seconds=0.001)

        desk.bring(1)
        await until(lambda: desk.told)

        assert desk.told == [1]

    run(story())


def test_a_batch_starts_in_groups_of_one_type_in_the_order_of_arrival() -> None:
    async def story() -> None:
        desk = Desk(batch_size=6)

        desk.bring(1, "a", 2, "b", 3.0, 3)
        await desk.intake.drained()

        assert desk.begun == [1, 2, 3, "a", "b", 3.0]

    run(story())


# Running side by side


def test_a_slow_message_holds_up_nobody() -> None:
    async def story() -> None:
        desk = Desk(gated=True)

        desk.bring(1, 2)
        await until(lambda: desk.begun == [1, 2])
        desk.bring(3)
        await until(lambda: desk.begun == [1, 2, 3])

        assert desk.told == []

    run(story())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_run_at_once_than_allowed(concurrency: int) -> None:
    async def story() -> None:
        desk = Desk(gated=True, concurrency=concurrency)

        desk.bring(*range(8))
        await until(lambda: len(desk.begun) == concurrency)
        for _ in range(5):
            await asyncio.sleep(0)
        desk.gate.set()
        await desk.intake.drained()

        assert desk.most == concurrency
        assert sorted(desk.told) == list(range(8))

    run(story())


def test_when_too_many_run_the_rest_stays_in_the_queue() -> None:
    async def story() -> None:
        desk = Desk(gated=True, concurrency=1, batch_size=2)

        desk.bring(*range(5))
        await until(lambda: desk.begun)
        for _ in range(5):
            await asyncio.sleep(0)

        assert len(desk.queue) == 3

    run(story())


def test_a_handler_that_cancels_itself_ends_alone() -> None:
    async def story() -> None:
        desk = Desk(batch_size=3, concurrency=1)
        deliver = desk.deliver

        async def suicidal(topic: str, envelope: Envelope[Any]) -> object:
            task = asyncio.current_task()
            if envelope.payload == 1 and task is not None:
                task.cancel()
            return await deliver(topic, envelope)

        desk.gate.clear()
        desk.intake._deliver = suicidal
        desk.bring(1, 2, 3)
        await until(lambda: desk.abandoned)
        desk.gate.set()
        await desk.intake.drained()

        assert (desk.abandoned, desk.told) == ([1], [2, 3])

    run(story())


# Contexts


def test_handlers_do_not_see_the_variables_of_whoever_published_first() -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[tuple[str, bool]] = []

    async def story() -> None:
        request.set("the first one")
        desk = Desk()

        async def deliver(topic: str, envelope: Envelope[Any]) -> None:
            seen.append((request.get(), delivering.get()))

        desk.intake._deliver = deliver
        desk.bring(1)
        await desk.intake.drained()

        assert not delivering.get()

    run(story())

    assert seen == [("none", True)]


# Draining


def test_draining_hurries_a_batch_that_is_not_full() -> None:
    async def story() -> None:
        desk = Desk(batch_size=100, wait_seconds=LONG)

        desk.bring(1, 2)
        await desk.intake.drained()

        assert desk.told == [1, 2]

    run(story())


def test_draining_hurries_what_comes_meanwhile() -> None:
    async def story() -> None:
        desk = Desk(gated=True, wait_seconds=LONG)
        desk.bring(1, 2)
        await until(lambda: desk.begun == [1, 2])

        draining = asyncio.create_task(desk.intake.drained())
        for _ in range(5):
            await asyncio.sleep(0)
        desk.bring(3)
        desk.gate.set()
        await draining

        assert sorted(desk.told) == [1, 2, 3]

    run(story())


def test_after_draining_batches_fill_again() -> None:
    async def story() -> None:
        desk = Desk(wait_seconds=LONG)
        desk.bring(1)
        await desk.intake.drained()

        desk.bring(2)
        for _ in range(5):
            await asyncio.sleep(0)

        assert (desk.told, desk.intake.is_idle) == ([1], False)

    run(story())


def test_one_who_gives_up_draining_changes_nothing() -> None:
    async def story() -> None:
        desk = Desk(gated=True)
        desk.bring(1, 2)
        impatient = asyncio.create_task(desk.intake.drained())
        await until(lambda: desk.begun == [1, 2])

        impatient.cancel()
        await asyncio.wait([impatient])
        desk.gate.set()
        await desk.intake.drained()

        assert desk.told == [1, 2]

    run(story())


def test_draining_ends_when_the_rest_is_abandoned() -> None:
    async def story() -> None:
        desk = Desk(wait_seconds=LONG)
        desk.bring(1)
        draining = asyncio.create_task(desk.intake.drained())

        await desk.end()
        await draining

        assert (desk.told, desk.abandoned) == ([], [1])

    run(story())


# Ending


def test_what_is_left_at_the_end_is_abandoned_wherever_it_stands() -> None:
    async def story() -> None:
        desk = Desk(gated=True, concurrency=1, batch_size=2)
        desk.bring(1, 2, 3)
        await until(lambda: desk.begun)

        await desk.end()

        assert (desk.begun, desk.told, sorted(desk.abandoned)) == ([1], [], [1, 2, 3])

    run(story())


def test_after_the_end_nothing_is_accepted_that_nobody_would_take() -> None:
    async def story() -> None:
        desk = Desk()

        await desk.end()

        assert not desk.queue.offer_all([(TOPIC, Envelope(1))])

    run(story())


def test_a_handler_may_clean_up_when_it_is_cancelled() -> None:
    cleaned: list[Any] = []

    async def story() -> None:
        desk = Desk()

        async def tidy(topic: str, envelope: Envelope[Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(envelope.payload)

        desk.intake._deliver = tidy
        desk.bring(1)
        await until(lambda: desk.intake._running)
        await desk.end()

        assert desk.abandoned == cleaned == [1]

    run(story())


def test_a_handler_that_takes_no_notice_is_left_alone_and_has_no_second_end() -> None:
    async def story() -> None:
        desk = Desk(clean_up_seconds=0.01)
        enough = asyncio.Event()

        async def deaf(topic: str, envelope: Envelope[Any]) -> str:
            desk.begun.append(envelope.payload)
            while not enough.is_set():
                try:
                    await enough.wait()
                except asyncio.CancelledError:
                    continue
            return "done after all"

        desk.intake._deliver = deaf
        desk.bring(1)
        await until(lambda: desk.begun)
        await desk.end()
        enough.set()
        await desk.intake.drained()

        assert (desk.abandoned, desk.told) == ([1], [])

    run(story())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_ends_the_program_does_not_lose_the_message(error: BaseException) -> None:
    desks: list[Desk] = []

    async def story() -> None:
        desk = Desk()
        desks.append(desk)

        async def fatal(topic: str, envelope: Envelope[Any]) -> None:
            raise error

        desk.intake._deliver = fatal
        desk.bring(1, 2)
        await asyncio.Event().wait()

    with pytest.raises(type(error)):
        asyncio.run(story())

    assert (sorted(desks[0].abandoned), desks[0].told) == ([1, 2], [])


def test_an_event_loop_that_ends_abandons_what_is_left() -> None:
    desks: list[Desk] = []

    async def story() -> None:
        desk = Desk(gated=True, concurrency=1, wait_seconds=LONG)
        desks.append(desk)
        desk.bring(1, 2)
        await until(lambda: desk.begun)
        desk.bring(3)

    run(story())

    assert sorted(desks[0].abandoned) == [1, 2, 3]


def test_an_event_loop_that_ends_while_a_worker_does_leaves_no_task_behind() -> None:
    async def story() -> Desk:
        desk = Desk(gated=True, concurrency=1, batch_size=1)
        desk.bring(1)
        await until(lambda: desk.begun)
        for _ in range(5):
            await asyncio.sleep(0)
        # The worker ends, the next message is taken before that is known, and then everything is over.
        desk.gate.set()
        desk.gate = asyncio.Event()
        desk.bring(2)
        return desk

    desk = asyncio.run(story())

    assert (desk.begun, desk.told, desk.abandoned) == ([1], [1], [2])
    assert desk.intake.is_idle


def test_a_loop_closed_with_tasks_pending_abandons_what_is_left_when_asked() -> None:
    loop = asyncio.new_event_loop()

    async def story() -> Desk:
        desk = Desk(gated=True, concurrency=1, wait_seconds=LONG)
        desk.bring(1, 2)
        await until(lambda: desk.begun)
        desk.bring(3)
        return desk

    desk = loop.run_until_complete(story())
    pending = asyncio.all_tasks(loop)
    loop.close()
    desk.intake.abandon_all()

    assert (sorted(desk.abandoned), desk.told) == ([1, 2, 3], [])
    for task in pending:
        # Or asyncio complains of tasks that were destroyed.
        task.get_coro().close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert len(desk.abandoned) == 3
