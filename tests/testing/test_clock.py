import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from raydispatch.dispatch.breaker import CircuitBreaker, CircuitState
from raydispatch.errors import InvalidParameter
from raydispatch.settings import BreakerSettings
from raydispatch.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_time_stands_still_until_it_is_moved(clock: FakeClock) -> None:
    before = clock.now()

    clock.tick(2.5)

    assert (before, clock.now()) == (0.0, 2.5)


def test_a_breaker_believes_it(clock: FakeClock) -> None:
    breaker = CircuitBreaker(BreakerSettings(failure_threshold=1, reset_after_seconds=60), now=clock.now)
    permit = breaker.admit()
    assert permit is not None
    breaker.failed(permit)

    clock.tick(60)

    assert breaker.state is CircuitState.HALF_OPEN


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_time_does_not_go_back_nor_to_its_end(clock: FakeClock, seconds: float) -> None:
    with pytest.raises(InvalidParameter, match="Time goes on by 0 seconds or more"):
        clock.tick(seconds)
    with pytest.raises(InvalidParameter):
        asyncio.run(clock.advance(seconds))


def test_sleepers_wake_in_the_order_of_their_deadlines_each_at_its_own_time(clock: FakeClock) -> None:
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    async def run() -> None:
        tasks = [asyncio.create_task(sleep(*one)) for one in [("c", 3), ("a", 1), ("b", 2), ("b2", 2), ("late", 9)]]
        await clock.advance(5)
        assert clock.sleeping == 1
        tasks[-1].cancel()

    asyncio.run(run())

    assert woken == [("a", 1), ("b", 2), ("b2", 2), ("c", 3)]
    assert clock.now() == 5
    assert clock.sleeping == 0


def test_one_who_goes_to_sleep_again_is_woken_again(clock: FakeClock) -> None:
    times: list[float] = []

    async def tick_tock() -> None:
        while True:
            await clock.sleep(2)
            times.append(clock.now())

    async def run() -> None:
        task = asyncio.create_task(tick_tock())
        await clock.advance(7)
        task.cancel()

    asyncio.run(run())

    assert times == [2, 4, 6]


def test_ten_times_a_tenth_is_one(clock: FakeClock) -> None:
    async def run() -> None:
        task = asyncio.create_task(clock.sleep(1))
        for _ in range(10):
            await clock.advance(0.1)
        assert task.done()

    asyncio.run(run())


def test_tick_wakes_too_but_does_not_wait(clock: FakeClock) -> None:
    async def run() -> None:
        task = asyncio.create_task(clock.sleep(1))
        await clock.wait_for_sleepers(1)
        clock.tick(1)
        assert not task.done()
        await task

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, -1])
def test_sleeping_for_nothing_ends_by_itself(clock: FakeClock, seconds: float) -> None:
    asyncio.run(clock.sleep(seconds))

    assert clock.now() == 0


def test_one_who_is_cancelled_sleeps_no_more(clock: FakeClock) -> None:
    async def run() -> int:
        first, second = asyncio.create_task(clock.sleep(1)), asyncio.create_task(clock.sleep(2))
        await clock.wait_for_sleepers(2)
        first.cancel()
        await asyncio.wait([first])
        left = clock.sleeping
        await clock.advance(2)
        await second
        return left

    assert asyncio.run(run()) == 1


def test_waiting_for_sleepers_that_do_not_come_ends(clock: FakeClock) -> None:
    with pytest.raises(TimeoutError, match="0 of 2 sleepers"):
        asyncio.run(clock.wait_for_sleepers(2, limit_seconds=0.01))


def test_a_sleeper_in_another_thread_and_loop_wakes_too(clock: FakeClock) -> None:
    async def sleep() -> float:
        await clock.sleep(30)
        return clock.now()

    async def run(pool: ThreadPoolExecutor) -> float:
        asleep = pool.submit(lambda: asyncio.run(sleep()))
        await clock.wait_for_sleepers(1)
        await clock.advance(31)
        return await asyncio.wrap_future(asleep)

    with ThreadPoolExecutor() as pool:
        assert 30 <= asyncio.run(run(pool)) <= 31


def test_run_skips_all_pauses_and_gives_the_result(clock: FakeClock) -> None:
    async def work() -> str:
        for _ in range(3):
            await clock.sleep(100)
        await asyncio.to_thread(lambda: None)
        await clock.sleep(100)
        return "done"

    assert asyncio.run(clock.run(work())) == "done"
    assert clock.now() == 400


def test_run_raises_what_the_work_raises(clock: FakeClock) -> None:
    async def work() -> None:
        await clock.sleep(1)
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(clock.run(work()))


def test_run_gives_up_on_what_waits_for_something_else(clock: FakeClock) -> None:
    async def run() -> None:
        await clock.run(asyncio.Event().wait(), limit_seconds=0.02)

    with pytest.raises(TimeoutError, match=r"Not done after 0\.02 s"):
        asyncio.run(run())
