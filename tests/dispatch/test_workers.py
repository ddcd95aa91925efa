import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.dispatch.workers import Workers


class Shop:
    """Workers whose jobs wait at a gate, if there is one."""

    def __init__(self, limit: int = 10, *, gated: bool = False) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.idle = 0
        self.now = self.most = 0
        self.gate = asyncio.Event()
        if not gated:
            self.gate.set()
        self.workers: Workers[Any] = Workers(limit, self.work, self.note_idle)

    async def work(self, job: Any) -> None:
        self.begun.append(job)
        self.tasks.add(asyncio.current_task())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if not self.gate.is_set():
                await self.gate.wait()
            if isinstance(job, BaseException):
                raise job
        finally:
            self.now -= 1
        self.ended.append(job)

    def note_idle(self) -> None:
        self.idle += 1


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for everything that a test waits for
            await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_jobs_are_done_in_the_order_they_were_added() -> None:
    async def story() -> None:
        shop = Shop()

        shop.workers.add([1, 2])
        shop.workers.add([3])
        await until(lambda: shop.workers.is_idle)

        assert shop.begun == shop.ended == [1, 2, 3]

    run(story())


def test_jobs_that_never_wait_are_all_done_by_one_task_or_two() -> None:
    async def story() -> None:
        shop = Shop()

        shop.workers.add(range(1_000))
        await until(lambda: shop.workers.is_idle)

        assert len(shop.ended) == 1_000
        assert len(shop.tasks) <= 2

    run(story())


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_no_more_run_at_once_than_allowed(limit: int) -> None:
    async def story() -> None:
        shop = Shop(limit, gated=True)

        shop.workers.add(range(20))
        await until(lambda: len(shop.begun) == limit)
        await turns()
        assert shop.now == limit
        shop.gate.set()
        await until(lambda: shop.workers.is_idle)

        assert shop.most == limit
        assert sorted(shop.ended) == list(range(20))

    run(story())


def test_nothing_added_is_nothing_done() -> None:
    async def story() -> None:
        shop = Shop()

        shop.workers.add([])
        await turns()

        assert shop.workers.is_idle
        assert shop.begun == []

    run(story())


def test_it_says_when_nothing_is_left() -> None:
    async def story() -> None:
        shop = Shop(gated=True)

        shop.workers.add([1, 2, 3])
        await until(lambda: shop.now == 3)
        busy = (shop.idle, shop.workers.is_idle)
        shop.gate.set()
        await until(lambda: shop.idle)

        assert busy == (0, False)
        assert shop.workers.is_idle

    run(story())


def test_jobs_that_come_while_others_run_begin_at_once() -> None:
    async def story() -> None:
        shop = Shop(gated=True)

        shop.workers.add([1])
        await until(lambda: shop.begun == [1])
        shop.workers.add([2])
        await until(lambda: shop.begun == [1, 2])

        assert shop.ended == []

    run(story())


def test_a_job_that_is_cancelled_leaves_the_others_to_be_done() -> None:
    async def story() -> None:
        shop = Shop(limit=1)

        shop.workers.add([1, asyncio.CancelledError(), 2])
        await until(lambda: shop.workers.is_idle)

        assert shop.ended == [1, 2]

    run(story())


def test_stopping_cancels_what_runs_and_leaves_what_waits() -> None:
    async def story() -> None:
        shop = Shop(limit=2, gated=True)
        shop.workers.add(range(5))
        await until(lambda: shop.now == 2)

        await shop.workers.stop()

        assert shop.now == 0
        assert list(shop.workers.waiting) == [2, 3, 4]
        assert shop.ended == []

    run(story())


def test_a_lone_job_can_be_done_in_the_callers_own_task() -> None:
    async def story() -> None:
        shop = Shop()

        assert shop.workers.has_place
        await shop.workers.do(1)

        assert shop.ended == [1]
        assert shop.tasks == {asyncio.current_task()}

    run(story())


@pytest.mark.parametrize("limit", [1, 3])
def test_jobs_in_their_callers_tasks_count_like_all_others(limit: int) -> None:
    async def story() -> None:
        shop = Shop(limit, gated=True)

        calls: list[asyncio.Task[None]] = []
        while shop.workers.has_place:
            calls.append(asyncio.create_task(shop.workers.do(f"call {len(calls)}")))
            await turns(1)
        shop.workers.add(range(5))
        await turns()
        assert shop.now == limit == len(calls)
        assert not shop.workers.is_idle
        shop.gate.set()
        await asyncio.gather(*calls)
        await until(lambda: shop.workers.is_idle)

        assert shop.most == limit
        assert len(shop.ended) == limit + 5

    run(story())


def test_there_is_no_place_for_a_caller_while_others_wait() -> None:
    async def story() -> None:
        shop = Shop(limit=5)

        shop.workers.add([1, 2])

        assert not shop.workers.has_place
        await until(lambda: shop.workers.is_idle)

    run(story())


def test_a_caller_that_is_cancelled_gives_its_place_back() -> None:
    async def story() -> None:
        shop = Shop(limit=1, gated=True)
        call = asyncio.create_task(shop.workers.do("gives up"))
        await until(lambda: shop.now == 1)
        shop.workers.add([1])

        call.cancel()
        shop.gate.set()
        await until(lambda: shop.workers.is_idle)

        assert shop.ended == [1]

    run(story())


@settings(max_examples=50, deadline=None)
@given(limit=st.integers(1, 4), pauses=st.lists(st.integers(0, 3), max_size=30), sizes=st.lists(st.integers(0, 5)))
def test_every_job_is_done_once_whatever_it_waits_for(limit: int, pauses: list[int], sizes: list[int]) -> None:
    async def story() -> None:
        done: list[int] = []
        running = [0, 0]

        async def work(job: int) -> None:
            running[0] += 1
            running[1] = max(running)
            for _ in range(pauses[job]):
                await asyncio.sleep(0)
            running[0] -= 1
            done.append(job)

        workers: Workers[int] = Workers(limit, work, lambda: None)
        left = list(range(len(pauses)))
        for size in (*sizes, len(left)):
            workers.add(left[:size])
            del left[:size]
            await asyncio.sleep(0)
        await until(lambda: workers.is_idle)

        assert sorted(done) == list(range(len(pauses)))
        assert running[1] <= limit

    run(story())
