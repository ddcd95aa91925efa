import asyncio
import gc
import weakref

import pytest

from raydispatch.dispatch.time_limit import TimeLimit, TimeLimitExpired


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_call_in_time_is_left_alone() -> None:
    limit = TimeLimit(60)

    async def call() -> str:
        with limit.call():
            await asyncio.sleep(0)
            return "done"

    assert asyncio.run(call()) == "done"


def test_every_one_of_many_calls_expires() -> None:
    limit = TimeLimit(0.01)

    async def call() -> None:
        with limit.call():
            await forever()

    async def all_calls() -> list[BaseException | None]:
        return await asyncio.gather(*(call() for _ in range(20)), return_exceptions=True)

    assert all(type(ended) is TimeLimitExpired for ended in asyncio.run(all_calls()))


def test_the_timer_goes_on_for_a_call_that_began_later() -> None:
    limit = TimeLimit(0.01)

    async def call() -> None:
        with limit.call():
            await forever()

    async def one_after_the_other() -> None:
        for _ in range(3):
            with pytest.raises(TimeLimitExpired):
                await call()

    asyncio.run(one_after_the_other())


def test_a_task_is_not_left_cancelling_after_its_time_was_up() -> None:
    limit = TimeLimit(0.01)

    async def call() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeLimitExpired), limit.call():
            await forever()
        return task.cancelling()

    assert asyncio.run(call()) == 0


def test_a_cancellation_from_outside_stays_one() -> None:
    limit = TimeLimit(60)

    async def call() -> None:
        with limit.call():
            await forever()

    async def cancel_it() -> bool:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancel_it())


def test_an_error_of_the_block_passes_unchanged() -> None:
    limit = TimeLimit(60)

    async def call() -> None:
        with limit.call():
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        asyncio.run(call())
    assert type(caught.value) is TimeoutError


def test_a_closed_loop_is_not_kept() -> None:
    limit = TimeLimit(3600)

    async def call() -> "weakref.ref[asyncio.AbstractEventLoop]":
        with limit.call():
            return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(call())
    gc.collect()

    assert loop() is None
