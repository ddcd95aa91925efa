import asyncio
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch.delivery.rate import TokenBucket
from raydispatch.errors import InvalidParameter


class FakeTime:
    """A clock for which to sleep is to be told how long, until `advance` wakes those whose time has come."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.sleepers.append((self.seconds + seconds, woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        self.seconds += seconds
        for moment, woken in self.sleepers:
            if moment <= self.seconds + 1e-9:
                woken.set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_burst_passes_and_then_one_after_another() -> None:
    clock = FakeTime()
    bucket = TokenBucket(10, burst=3, now=clock)

    at_once = [bucket.take() for _ in range(4)]
    clock.seconds += 0.1
    later = [bucket.take() for _ in range(2)]

    assert at_once == [True, True, True, False]
    assert later == [True, False]


def test_a_long_pause_saves_up_one_burst_and_no_more() -> None:
    clock = FakeTime()
    bucket = TokenBucket(10, burst=2, now=clock)
    bucket.take()

    clock.seconds += 1_000

    assert [bucket.take() for _ in range(3)] == [True, True, False]


def test_a_steady_stream_at_the_limit_always_passes() -> None:
    clock = FakeTime()
    bucket = TokenBucket(10, burst=1, now=clock)

    taken = []
    for step in range(1_000):
        clock.seconds = step * 0.1  # Not a sum: it differs from one in the last digits.
        taken.append(bucket.take())

    assert all(taken)


@pytest.mark.parametrize(("per_second", "burst"), [(0.2, 1), (1, 1), (2.5, 2), (100, 100)])
def test_a_burst_is_one_seconds_worth_if_not_given(per_second: float, burst: int) -> None:
    assert TokenBucket(per_second).burst == burst


@pytest.mark.parametrize("per_second", [0, -1, float("nan"), float("inf")])
def test_a_rate_must_be_a_positive_number(per_second: float) -> None:
    with pytest.raises(InvalidParameter, match="per_second must be"):
        TokenBucket(per_second)


def test_a_burst_must_let_something_through() -> None:
    with pytest.raises(InvalidParameter, match="burst must be"):
        TokenBucket(1, burst=0)


@given(
    per_second=st.floats(0.1, 1_000),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0, 3), min_size=1, max_size=100),
)
def test_no_stretch_of_time_sees_more_than_burst_and_rate_allow(
    per_second: float, burst: int, pauses: list[float]
) -> None:
    clock = FakeTime()
    bucket = TokenBucket(per_second, burst, now=clock)
    passed: list[float] = []

    for pause in pauses:
        clock.seconds += pause
        passed += [clock.seconds for _ in range(5) if bucket.take()]

    for first, start in enumerate(passed):
        for count, end in enumerate(passed[first:], start=1):
            assert count <= burst + per_second * (end - start) + 1e-6


class WaitingRoom:
    """People who wait for their turn at a bucket of one a second; `passed` says who had it, in order."""

    def __init__(self, burst: int = 1) -> None:
        self.clock = FakeTime()
        self.passed: list[str] = []
        self._bucket = TokenBucket(1, burst, now=self.clock)
        self._people: list[asyncio.Task[None]] = []

    async def comes(self, name: str) -> "asyncio.Task[None]":
        self._people.append(asyncio.create_task(self._wait(name)))
        await settle()
        return self._people[-1]

    async def close(self) -> None:
        for person in self._people:
            person.cancel()
        await asyncio.wait(self._people)

    async def _wait(self, name: str) -> None:
        await self._bucket.turn(self.clock.sleep)
        self.passed.append(name)


def test_those_who_wait_pass_in_the_order_of_coming() -> None:
    async def scene() -> list[str]:
        room = WaitingRoom(burst=2)
        seen = []
        for name in "abcd":
            await room.comes(name)
        for _ in range(3):
            seen.append("".join(room.passed))
            await room.clock.advance(1)
        await room.close()
        return seen

    assert asyncio.run(scene()) == ["ab", "abc", "abcd"]


def test_the_turn_of_one_who_gives_up_goes_to_the_next_who_comes() -> None:
    async def scene() -> list[str]:
        room = WaitingRoom()
        for name in "abc":
            person = await room.comes(name)
            if name == "b":
                impatient = person
        impatient.cancel()
        await settle()
        await room.comes("d")
        await room.clock.advance(1)
        await room.clock.advance(1)
        await room.close()
        return room.passed

    assert asyncio.run(scene()) == ["a", "d", "c"]


def test_turns_that_were_given_back_and_are_over_are_not_given_again() -> None:
    async def scene() -> list[str]:
        room = WaitingRoom()
        await room.comes("a")
        for name in "bc":
            (await room.comes(name)).cancel()
        await room.clock.advance(10)
        for name in "de":
            await room.comes(name)
        await room.close()
        return room.passed

    assert asyncio.run(scene()) == ["a", "d"]


def test_a_crowd_that_gave_up_holds_up_nobody() -> None:
    async def scene() -> list[str]:
        room = WaitingRoom()
        await room.comes("a")
        crowd = [await room.comes("x") for _ in range(100)]
        for person in crowd:
            person.cancel()
        await settle()
        await room.comes("b")
        await room.clock.advance(1)
        await room.close()
        return room.passed

    assert asyncio.run(scene()) == ["a", "b"]


def test_it_arrives_full_in_another_process() -> None:
    bucket = TokenBucket(10, burst=2, now=time.monotonic)
    while bucket.take():
        pass

    arrived = pickle.loads(pickle.dumps(bucket))

    assert (arrived.per_second, arrived.burst) == (10, 2)
    assert arrived.take()
