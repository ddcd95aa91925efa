import asyncio
import pickle
import threading

import pytest

from raydispatch.testing.tally import Tally


def test_who_waits_is_woken_when_the_count_is_reached() -> None:
    async def wait() -> int:
        tally = Tally()
        waiting = asyncio.create_task(tally.wait_for(2, 5, "calls"))
        await asyncio.sleep(0)
        tally.add()
        tally.add()
        await waiting
        return tally.count

    assert asyncio.run(wait()) == 2


def test_a_count_that_is_there_already_is_not_waited_for() -> None:
    asyncio.run(Tally(3).wait_for(2, 0, "calls"))


def test_counting_in_another_thread_wakes_as_well() -> None:
    async def wait() -> None:
        tally = Tally()
        thread = threading.Thread(target=tally.add)
        waiting = asyncio.create_task(tally.wait_for(1, 5, "calls"))
        await asyncio.sleep(0)
        thread.start()
        await waiting
        thread.join()

    asyncio.run(wait())


def test_waiting_in_vain_says_how_many_there_were() -> None:
    tally = Tally(1)

    with pytest.raises(TimeoutError, match=r"1 of 3 calls after 0\.01 s"):
        asyncio.run(tally.wait_for(3, 0.01, "calls"))
    tally.add(5)

    assert tally.count == 6


def test_one_who_gives_up_does_not_disturb_the_others() -> None:
    async def wait() -> None:
        tally = Tally()
        first, second = (asyncio.create_task(tally.wait_for(1, 5, "calls")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        tally.add()
        await second

    asyncio.run(wait())


def test_it_pickles_with_its_count() -> None:
    assert pickle.loads(pickle.dumps(Tally(4))).count == 4
