import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raydispatch.delivery.backpressure import AdaptiveRate, BoundedQueue, QueueCounts, Verdict
from raydispatch.errors import InvalidState
from raydispatch.settings import BackpressureSettings, BackpressureStrategy

ACCEPTED, QUEUE_FULL, RATE_LIMITED, CLOSED = Verdict
WAIT, REJECT_NEW, DROP_OLDEST, ADAPTIVE = BackpressureStrategy
LINGER = 77.0


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def make_queue(strategy: BackpressureStrategy = REJECT_NEW, capacity: int = 3, filled: int = 0) -> BoundedQueue[int]:
    queue = BoundedQueue[int](BackpressureSettings(strategy=strategy, capacity=capacity))
    assert queue.offer_all(range(filled))
    return queue


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 5))


async def others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begin(queue: BoundedQueue[int], *items: int) -> list[asyncio.Task[Verdict]]:
    """Senders that have come as far as they get."""
    senders = [asyncio.create_task(queue.put(item)) for item in items]
    await others_run()
    return senders


def adds_up(queue: BoundedQueue[int], offered: int) -> bool:
    counts = queue.counts
    came_in = counts.taken + counts.dropped + len(queue)
    return counts.accepted == came_in and offered == counts.accepted + counts.rejected + counts.rate_limited


# Strategies


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_items_leave_in_the_order_they_came(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy)

    verdicts = [queue.offer(item) for item in (1, 2, 3)]

    assert verdicts == [ACCEPTED] * 3
    assert [queue.take(2), queue.take(2), queue.take(2)] == [[1, 2], [3], []]
    assert queue.counts == QueueCounts(accepted=3, taken=3, rejected=0, rate_limited=0, dropped=0)


@pytest.mark.parametrize("strategy", [WAIT, REJECT_NEW, ADAPTIVE])
def test_an_offer_to_a_full_queue_is_refused(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy, filled=3)

    assert queue.offer(9) is QUEUE_FULL
    assert queue.counts == QueueCounts(accepted=3, taken=0, rejected=1, rate_limited=0, dropped=0)
    assert queue.take(9) == [0, 1, 2]


@pytest.mark.parametrize("strategy", [REJECT_NEW, ADAPTIVE])
def test_only_wait_makes_a_sender_wait(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy, filled=3)

    async def story() -> None:
        assert await queue.put(9) is QUEUE_FULL

    run(story())


def test_the_oldest_goes_for_a_new_one() -> None:
    gone: list[int] = []
    queue = BoundedQueue[int](BackpressureSettings(strategy=DROP_OLDEST, capacity=2), on_drop=gone.append)

    verdicts = [queue.offer(item) for item in range(5)]

    assert verdicts == [ACCEPTED] * 5
    assert gone == [0, 1, 2]
    assert queue.counts == QueueCounts(accepted=5, taken=0, rejected=0, rate_limited=0, dropped=3)
    assert queue.take(9) == [3, 4]


def test_who_is_told_of_a_drop_may_use_the_queue() -> None:
    def take_the_rest(item: int) -> None:
        taken.append((item, queue.take(9)))

    taken: list[tuple[int, list[int]]] = []
    queue = BoundedQueue[int](BackpressureSettings(strategy=DROP_OLDEST, capacity=2), on_drop=take_the_rest)

    for item in range(3):
        queue.offer(item)

    assert taken == [(0, [1, 2])]
    assert adds_up(queue, offered=3)


def test_a_sender_is_not_made_to_wait_when_there_is_room() -> None:
    queue = make_queue(WAIT)

    with pytest.raises(StopIteration) as finished:
        # One step by hand, and no loop runs: a future or a turn of the loop could not be had here.
        queue.put(1).send(None)

    assert finished.value.value is ACCEPTED


# All or none


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_all_come_in_or_none(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy, capacity=4, filled=1)

    answers = [queue.offer_all([1, 2]), queue.offer_all([3, 4]), queue.offer_all([5])]

    assert answers == [True, False, True]
    assert queue.counts == QueueCounts(accepted=4, taken=0, rejected=2, rate_limited=0, dropped=0)
    assert queue.take(9) == [0, 1, 2, 5]


def test_none_at_all_always_come_in() -> None:
    queue = make_queue(filled=3)
    queue.close()

    assert queue.offer_all([])
    assert not queue.offer_all([1])


# Waiting for room


def test_senders_wait_first_come_first_served() -> None:
    queue = make_queue(WAIT, capacity=2, filled=2)

    async def story() -> None:
        senders = await begin(queue, 10, 11, 12)
        waited = [sender.done() for sender in senders]

        taken = queue.take(2)
        await others_run()
        came_in = [sender.done() for sender in senders]
        taken += queue.take(2)
        await others_run()

        assert waited == [False, False, False]
        assert came_in == [True, True, False]
        assert [sender.result() for sender in senders] == [ACCEPTED] * 3
        assert taken + queue.take(9) == [0, 1, 10, 11, 12]
        assert adds_up(queue, offered=5)

    run(story())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_an_offer_does_not_overtake_a_sender_whose_turn_has_come(limit: int) -> None:
    queue = make_queue(WAIT, capacity=3, filled=3)

    async def story() -> None:
        (sender,) = await begin(queue, 10)

        taken = queue.take(limit)
        # There may be room for more, but the one who waited has not run yet.
        early = queue.offer(20), queue.offer_all([21])
        await sender
        taken += queue.take(3)

        assert early == (QUEUE_FULL, False)
        assert queue.offer(22) is ACCEPTED
        assert taken + queue.take(9) == [0, 1, 2, 10, 22]
        assert adds_up(queue, offered=7)

    run(story())


def test_a_newcomer_comes_in_behind_a_sender_whose_turn_has_come() -> None:
    queue = make_queue(WAIT, capacity=3, filled=3)

    async def story() -> None:
        (sender,) = await begin(queue, 10)

        queue.take(3)
        # Put in this very turn of the loop, before the sender could run.
        newcomer = await queue.put(11)

        assert (sender.result(), newcomer) == (ACCEPTED, ACCEPTED)
        assert queue.take(9) == [10, 11]

    run(story())


def test_a_sender_cancelled_in_the_middle_takes_no_place() -> None:
    queue = make_queue(WAIT, capacity=2, filled=2)

    async def story() -> None:
        first, second, third = await begin(queue, 10, 11, 12)

        second.cancel()
        queue.take(2)
        await others_run()

        assert (first.result(), second.cancelled(), third.result()) == (ACCEPTED, True, ACCEPTED)
        assert queue.take(9) == [10, 12]
        assert adds_up(queue, offered=4)

    run(story())


def test_a_sender_cancelled_after_its_turn_came_hands_it_on() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        first, second = await begin(queue, 10, 11)

        queue.take(1)
        first.cancel()
        await others_run()

        assert (first.cancelled(), second.result()) == (True, ACCEPTED)
        assert queue.take(9) == [11]
        assert adds_up(queue, offered=2)

    run(story())


def test_the_last_sender_in_line_leaves_the_way_free_when_cancelled() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        (only,) = await begin(queue, 10)

        queue.take(1)
        only.cancel()
        await others_run()

        assert only.cancelled()
        assert queue.offer(11) is ACCEPTED

    run(story())


def test_senders_that_give_up_leave_nothing_behind() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        for sender in await begin(queue, *range(100)):
            sender.cancel()
        await others_run()

        # Nothing was taken, and a line that only shrinks then would grow with every sender that timed out.
        assert len(queue._line) == 0

    run(story())


def test_a_queue_can_be_closed_while_a_sender_gives_up() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        first, second = await begin(queue, 10, 11)

        first.cancel()
        queue.close()
        await others_run()

        assert (first.cancelled(), second.result()) == (True, CLOSED)
        assert adds_up(queue, offered=2)

    run(story())


def test_closing_turns_away_those_who_wait() -> None:
    queue = make_queue(WAIT, capacity=2, filled=2)

    async def story() -> None:
        senders = await begin(queue, 10, 11)

        queue.take(1)
        queue.close()
        await others_run()

        # The first had been called already, and comes too late all the same.
        assert [sender.result() for sender in senders] == [CLOSED, CLOSED]
        assert queue.take(9) == [1]
        assert adds_up(queue, offered=4)

    run(story())


def test_closing_and_reopening_at_once_turns_away_those_who_wait() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        (sender,) = await begin(queue, 10)

        queue.close()
        queue.reopen()
        queue.take(1)

        assert queue.offer(11) is ACCEPTED
        assert await sender is CLOSED
        assert queue.take(9) == [11]

    run(story())


# Closing


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_a_closed_queue_lets_items_out_but_not_in(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy, filled=1)
    queue.close()

    async def story() -> None:
        assert [queue.offer(7), await queue.put(8)] == [CLOSED, CLOSED]

    run(story())

    assert queue.counts == QueueCounts(accepted=1, taken=0, rejected=2, rate_limited=0, dropped=0)
    assert queue.take(9) == [0]


@pytest.mark.parametrize("strategy", BackpressureStrategy)
def test_a_reopened_queue_is_as_before(strategy: BackpressureStrategy) -> None:
    queue = make_queue(strategy, filled=1)
    queue.close()

    queue.reopen()

    assert queue.offer(1) is ACCEPTED
    assert queue.take(9) == [0, 1]


# Pressure


def test_pressure_begins_at_the_high_mark_and_ends_at_the_low_mark() -> None:
    told: list[bool] = []
    queue = BoundedQueue[int](BackpressureSettings(capacity=10, high_mark=0.8, low_mark=0.5), on_pressure=told.append)

    seen = []
    for change in [+7, +1, +2, -4, +1, -1, -1, +2, +1, -8]:
        if change > 0:
            for item in range(change):
                queue.offer(item)
        else:
            queue.take(-change)
        seen.append((len(queue), queue.is_high))

    assert seen == [
        (7, False),
        (8, True),
        (10, True),
        (6, True),
        (7, True),
        (6, True),
        (5, False),
        (7, False),
        (8, True),
        (0, False),
    ]
    assert told == [True, False, True, False]


@pytest.mark.parametrize(
    ("capacity", "high_mark", "low_mark", "high", "low"),
    [
        (1, 0.8, 0.5, 1, 0),
        (10, 0.7, 0.5, 7, 5),
        (100, 0.55, 0.29, 55, 29),
        (10, 1.0, 0.99, 10, 9),
        (10, 1e-9, 0.0, 1, 0),
    ],
)
def test_marks_are_exact(capacity: int, high_mark: float, low_mark: float, high: int, low: int) -> None:
    queue = BoundedQueue[int](BackpressureSettings(capacity=capacity, high_mark=high_mark, low_mark=low_mark))

    risen = next(length for length in range(1, capacity + 1) if queue.offer(0) is ACCEPTED and queue.is_high)
    fallen = next(length for length in range(risen - 1, -1, -1) if queue.take(1) and not queue.is_high)

    assert (risen, fallen) == (high, low)


def test_many_at_once_raise_the_pressure_once() -> None:
    told: list[bool] = []
    queue = BoundedQueue[int](BackpressureSettings(capacity=10), on_pressure=told.append)

    queue.offer_all(range(10))

    assert told == [True]


# Callbacks


def test_a_callback_that_raises_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(news: object) -> None:
        raise KeyError("hunter2")

    chosen = BackpressureSettings(strategy=DROP_OLDEST, capacity=2)
    queue = BoundedQueue[int](chosen, on_drop=fail, on_pressure=fail)

    with caplog.at_level(logging.ERROR, logger="raydispatch"):
        verdicts = [queue.offer(item) for item in range(3)]
        taken = queue.take(9)

    assert verdicts == [ACCEPTED] * 3
    assert taken == [1, 2]
    assert queue.counts == QueueCounts(accepted=3, taken=2, rejected=0, rate_limited=0, dropped=1)
    assert [(record.levelname, record.message) for record in caplog.records] == [("ERROR", "queue callback failed")] * 3
    assert {record.__dict__["error_type"] for record in caplog.records} == {"KeyError"}
    assert "hunter2" not in caplog.text


# Waiting for items


class Timers:
    """Keeps the timers of those who linger, for a test to let time pass."""

    def __init__(self) -> None:
        self.handles: list[asyncio.TimerHandle] = []
        self.callbacks: list[Callable[[], object]] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def keep(delay: float, callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.TimerHandle:
            handle = call_later(delay, callback, *args, **options)
            if delay == LINGER:
                self.handles.append(handle)
                self.callbacks.append(callback)
            return handle

        loop.call_later = keep  # type: ignore[assignment]

    def pass_by(self) -> None:
        for callback in self.callbacks:
            callback()


async def begin_to_wait(queue: BoundedQueue[int], count: int) -> asyncio.Task[None]:
    taker = asyncio.create_task(queue.wait_for(count, LINGER))
    await others_run()
    return taker


@pytest.mark.parametrize("count", [1, 2, 3, 0])
def test_a_taker_goes_on_at_once_if_enough_is_there(count: int) -> None:
    queue = make_queue(filled=3)

    with pytest.raises(StopIteration):
        queue.wait_for(count, LINGER).send(None)


def test_a_taker_goes_on_as_soon_as_enough_is_there() -> None:
    queue = make_queue(capacity=9)

    async def story() -> None:
        timers = Timers()
        taker = await begin_to_wait(queue, 3)
        steps = []

        for item in range(3):
            steps.append((taker.done(), len(timers.handles)))
            queue.offer(item)
            await others_run()

        assert steps == [(False, 0), (False, 1), (False, 1)]
        assert taker.done()
        assert [handle.cancelled() for handle in timers.handles] == [True]

    run(story())


def test_many_at_once_wake_a_taker() -> None:
    queue = make_queue(capacity=9)

    async def story() -> None:
        taker = await begin_to_wait(queue, 3)

        queue.offer_all(range(3))

        await taker

    run(story())


def test_a_sender_from_the_line_wakes_a_taker() -> None:
    queue = make_queue(WAIT, capacity=1, filled=1)

    async def story() -> None:
        await begin(queue, 10)

        queue.take(1)
        await queue.wait_for(1, LINGER)

        assert queue.take(1) == [10]

    run(story())


def test_a_taker_makes_do_with_less_when_its_time_has_passed() -> None:
    queue = make_queue(capacity=9)

    async def story() -> None:
        timers = Timers()
        taker = await begin_to_wait(queue, 3)
        queue.offer(1)
        await others_run()
        lingered = not taker.done()

        timers.pass_by()
        await taker

        assert lingered
        assert queue.take(9) == [1]

    run(story())


def test_a_real_timer_ends_the_lingering() -> None:
    queue = make_queue(filled=1)

    run(queue.wait_for(3, 0.001))

    assert len(queue) == 1


def test_a_taker_that_does_not_linger_takes_what_is_there() -> None:
    queue = make_queue(filled=1)

    with pytest.raises(StopIteration):
        queue.wait_for(3, 0).send(None)


def test_a_full_queue_is_enough_for_any_taker() -> None:
    queue = make_queue(capacity=3, filled=2)

    async def story() -> None:
        taker = await begin_to_wait(queue, 100)

        queue.offer(1)

        await taker

    run(story())


def test_hurry_ends_the_lingering() -> None:
    queue = make_queue(filled=1)

    async def story() -> None:
        taker = await begin_to_wait(queue, 3)

        queue.hurry()

        await taker

    run(story())


def test_hurry_reaches_a_taker_that_is_about_to_linger() -> None:
    queue = make_queue()

    async def story() -> None:
        timers = Timers()
        taker = await begin_to_wait(queue, 3)

        queue.offer(1)
        queue.hurry()
        await taker

        assert timers.handles == []

    run(story())


def test_hurry_wakes_nobody_for_an_empty_queue_and_is_not_remembered() -> None:
    queue = make_queue()

    async def story() -> None:
        queue.hurry()
        taker = await begin_to_wait(queue, 2)
        queue.hurry()
        await others_run()
        queue.offer(1)
        await others_run()
        lingers = not taker.done()
        queue.offer(2)
        await taker

        assert lingers

    run(story())


@pytest.mark.parametrize("filled", [0, 1])
def test_closing_ends_the_waiting(filled: int) -> None:
    queue = make_queue(filled=filled)

    async def story() -> None:
        taker = await begin_to_wait(queue, 3)

        queue.close()
        queue.reopen()
        await taker
        queue.close()
        await queue.wait_for(3, LINGER)

        assert len(queue) == filled

    run(story())


def test_a_taker_whose_item_was_taken_by_another_waits_on() -> None:
    queue = make_queue()

    async def story() -> None:
        timers = Timers()
        taker = await begin_to_wait(queue, 2)

        queue.offer(1)
        queue.take(1)
        await others_run()

        assert not taker.done()
        assert timers.handles == []
        taker.cancel()

    run(story())


def test_there_is_one_taker_at_a_time() -> None:
    queue = make_queue()

    async def story() -> None:
        taker = await begin_to_wait(queue, 1)
        with pytest.raises(InvalidState, match="one taker"):
            await queue.wait_for(1, LINGER)

        taker.cancel()
        await others_run()
        queue.offer(1)

        await queue.wait_for(1, LINGER)

    run(story())


# The adaptive rate


def adaptive(time: FakeTime) -> AdaptiveRate:
    chosen = BackpressureSettings(adjust_seconds=1, rate_factor=0.5, rate_step=10, least_rate=4)
    return AdaptiveRate(chosen, time)


def admit(rate: AdaptiveRate, offers: int, is_high: bool) -> int:
    return sum(rate.admits(is_high) for _ in range(offers))


def limited(time: FakeTime) -> AdaptiveRate:
    """Limited to 50 after an interval of 100."""
    rate = adaptive(time)
    admit(rate, 100, is_high=True)
    time.advance(1)
    rate.adjust(is_high=True)
    assert rate.rate == 50
    return rate


def test_there_is_no_limit_without_pressure(time: FakeTime) -> None:
    rate = adaptive(time)

    for _ in range(5):
        assert admit(rate, 1000, is_high=False) == 1000
        time.advance(1)

    assert rate.rate is None


def test_pressure_halves_what_was_admitted_and_goes_on_halving(time: FakeTime) -> None:
    rate = adaptive(time)
    first = admit(rate, 100, is_high=True)

    rates = []
    for _ in range(6):
        time.advance(1)
        rate.adjust(is_high=True)
        rates.append(rate.rate)

    assert first == 100
    assert rates == [50, 25, 12.5, 6.25, 4, 4]


def test_nothing_changes_within_an_interval(time: FakeTime) -> None:
    rate = adaptive(time)

    admitted = admit(rate, 100, is_high=True)
    time.advance(0.75)
    admitted += admit(rate, 100, is_high=True)

    assert (admitted, rate.rate) == (200, None)


def test_intervals_without_an_offer_count_too(time: FakeTime) -> None:
    rate = limited(time)

    time.advance(2.5)
    rate.adjust(is_high=True)
    after_two = rate.rate
    time.advance(0.5)
    rate.adjust(is_high=True)

    assert (after_two, rate.rate) == (12.5, 6.25)


def test_a_limit_holds(time: FakeTime) -> None:
    rate = limited(time)

    at_once = admit(rate, 1000, is_high=False)
    admitted = 0
    for _ in range(4):
        time.advance(0.125)
        admitted += admit(rate, 1000, is_high=False)

    assert at_once == 0
    assert admitted == 25


def test_a_burst_is_at_most_what_an_interval_allows(time: FakeTime) -> None:
    rate = limited(time)

    time.advance(0.75)
    rate.adjust(is_high=True)
    time.advance(20)

    assert admit(rate, 1000, is_high=True) <= 50
    assert rate.rate == 4
    time.advance(100)
    assert admit(rate, 1000, is_high=True) == 4


def test_a_rate_below_one_still_lets_one_through(time: FakeTime) -> None:
    chosen = BackpressureSettings(adjust_seconds=1, least_rate=0.25)
    rate = AdaptiveRate(chosen, time)
    time.advance(1)

    admitted = []
    for _ in range(9):
        admitted.append(rate.admits(is_high=True))
        time.advance(1)

    assert rate.rate == 0.25
    assert admitted == [False] * 4 + [True] + [False] * 3 + [True]


def test_without_pressure_the_limit_grows_and_goes_away(time: FakeTime) -> None:
    rate = limited(time)

    rates = []
    for _ in range(8):
        time.advance(1)
        rate.adjust(is_high=False)
        rates.append(rate.rate)

    assert rates == [60, 70, 80, 90, 100, 110, 120, None]
    assert admit(rate, 1000, is_high=False) == 1000


def test_a_limit_that_is_gone_can_come_again(time: FakeTime) -> None:
    rate = limited(time)
    time.advance(8)
    admit(rate, 60, is_high=False)
    gone = rate.rate

    time.advance(1)
    at_once = admit(rate, 100, is_high=True)

    assert gone is None
    assert (at_once, rate.rate) == (0, 30)


def test_a_queue_limits_the_rate_while_it_is_high_and_recovers(time: FakeTime) -> None:
    chosen = BackpressureSettings(strategy=ADAPTIVE, capacity=20, adjust_seconds=1, rate_step=5, least_rate=1)
    queue = BoundedQueue[int](chosen, now=time)

    filled = [queue.offer(item) for item in range(16)]
    time.advance(1)
    limited_to = queue.offer(0), queue.rate
    time.advance(0.25)
    one_quarter = [queue.offer(item) for item in range(3)]
    queue.take(16)
    time.advance(3)
    recovered = [queue.offer(item) for item in range(10)]

    assert filled == [ACCEPTED] * 16
    assert limited_to == (RATE_LIMITED, 8)
    assert one_quarter == [ACCEPTED, ACCEPTED, RATE_LIMITED]
    assert recovered == [ACCEPTED] * 10
    assert queue.rate is None
    assert queue.counts == QueueCounts(accepted=28, taken=16, rejected=0, rate_limited=2, dropped=0)


def test_a_full_queue_says_so_rather_than_limiting_and_lowers_the_rate(time: FakeTime) -> None:
    queue = BoundedQueue[int](BackpressureSettings(strategy=ADAPTIVE, capacity=2, adjust_seconds=1), now=time)
    queue.offer_all([1, 2])

    time.advance(1)

    assert queue.offer(3) is QUEUE_FULL
    assert queue.rate == queue.settings.least_rate


def test_other_strategies_have_no_rate() -> None:
    assert [make_queue(strategy, filled=3).rate for strategy in BackpressureStrategy] == [None] * 4


def test_under_lasting_overload_about_as_much_comes_in_as_is_taken(time: FakeTime) -> None:
    chosen = BackpressureSettings(strategy=ADAPTIVE, capacity=1000, adjust_seconds=1, rate_step=5)
    queue = BoundedQueue[int](chosen, now=time)

    full = []
    for _ in range(3000):
        verdicts = [queue.offer(item) for item in range(60)]
        full.append(QUEUE_FULL in verdicts)
        queue.take(10)
        time.advance(0.125)

    assert not any(full[300:])
    assert queue.counts.rate_limited > 0
    assert queue.counts.taken > 0.9 * 10 * 3000


# Against a model


class RateModel:
    """The adaptive rate as one would tell it; intervals last a second."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.first = self.tokens = 0.0
        self.admitted = 0
        self.interval = self.refilled = 0.0

    def update(self, now: float, is_high: bool) -> None:
        if self.rate is not None:
            self.tokens = min(max(1, self.rate), self.tokens + (now - self.refilled) * self.rate)
        self.refilled = now
        passed = now // 1 - self.interval
        if not passed:
            return
        if self.rate is None and is_high:
            self.first = self.admitted / passed
            self.rate, self.tokens = max(1, self.admitted / passed * 0.5), 0
        elif self.rate is not None:
            self.rate = max(1, self.rate * 0.5**passed) if is_high else self.rate + 2 * passed
            if not is_high and self.rate > self.first * 1.25:
                self.rate = None
        self.interval, self.admitted = now // 1, 0

    def admits(self) -> bool:
        if self.rate is not None and self.tokens < 1:
            return False
        self.tokens -= 1
        self.admitted += 1
        return True


class QueueModel:
    """The queue as one would tell it: lists, and nobody ever runs late."""

    def __init__(self, strategy: BackpressureStrategy, capacity: int, high: int, low: int) -> None:
        self.strategy, self.capacity, self.high, self.low = strategy, capacity, high, low
        self.items: list[int] = []
        self.line: list[int] = []
        self.verdicts: dict[int, Verdict] = {}
        self.gone: list[int] = []
        self.pressure: list[bool] = []
        self.rate = RateModel()
        self.taken = 0
        self.is_closed = False
        self.now = 0.0

    @property
    def is_high(self) -> bool:
        return bool(self.pressure) and self.pressure[-1]

    def tell_pressure(self) -> None:
        if len(self.items) >= self.high and not self.is_high:
            self.pressure.append(True)
        if len(self.items) <= self.low and self.is_high:
            self.pressure.append(False)

    def offer(self, item: int) -> Verdict:
        self.verdicts[item] = self.judge(item)
        self.tell_pressure()
        return self.verdicts[item]

    def judge(self, item: int) -> Verdict:
        if self.is_closed:
            return CLOSED
        if self.strategy is ADAPTIVE:
            self.rate.update(self.now, self.is_high)
        if len(self.items) == self.capacity:
            if self.strategy is not DROP_OLDEST:
                return QUEUE_FULL
            self.gone.append(self.items.pop(0))
        if self.strategy is ADAPTIVE and not self.rate.admits():
            return RATE_LIMITED
        self.items.append(item)
        return ACCEPTED

    def put(self, item: int) -> None:
        if self.strategy is WAIT and len(self.items) == self.capacity and not self.is_closed:
            self.line.append(item)
        else:
            self.offer(item)

    def offer_all(self, items: list[int]) -> bool:
        fits = not items or (not self.is_closed and len(self.items) + len(items) <= self.capacity)
        self.verdicts |= dict.fromkeys(items, ACCEPTED if fits else QUEUE_FULL)
        self.items += items if fits else []
        self.tell_pressure()
        return fits

    def take(self, limit: int, cancelled: set[int]) -> list[int]:
        taken, self.items = self.items[:limit], self.items[limit:]
        self.taken += len(taken)
        self.tell_pressure()
        self.line = [item for item in self.line if item not in cancelled]
        while self.line and len(self.items) < self.capacity:
            self.offer(self.line.pop(0))
        return taken

    def close(self) -> None:
        self.is_closed = True
        self.verdicts |= dict.fromkeys(self.line, CLOSED)
        self.line = []

    @property
    def counts(self) -> QueueCounts:
        verdicts = list(self.verdicts.values())
        rejected = verdicts.count(QUEUE_FULL) + verdicts.count(CLOSED)
        return QueueCounts(verdicts.count(ACCEPTED), self.taken, rejected, verdicts.count(RATE_LIMITED), len(self.gone))


class QueueAgainstModel(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(BackpressureStrategy),
        shape=st.sampled_from([(1, 1, 0), (2, 1, 0), (4, 3, 1), (4, 4, 2), (8, 6, 4)]),
    )
    def begin(self, strategy: BackpressureStrategy, shape: tuple[int, int, int]) -> None:
        capacity, high, low = shape
        chosen = BackpressureSettings(
            strategy=strategy,
            capacity=capacity,
            high_mark=high / capacity,
            low_mark=low / capacity,
            adjust_seconds=1,
            rate_factor=0.5,
            rate_step=2,
            least_rate=1,
        )
        self.runner = asyncio.Runner()
        self.time = FakeTime()
        self.gone: list[int] = []
        self.pressure: list[bool] = []
        self.queue = BoundedQueue[int](
            chosen, now=self.time, on_drop=self.gone.append, on_pressure=self.pressure.append
        )
        self.model = QueueModel(strategy, capacity, high, low)
        self.senders: dict[int, asyncio.Task[Verdict]] = {}
        self.last = 0

    def fresh(self) -> int:
        self.last += 1
        return self.last

    @rule(count=st.integers(1, 4))
    def offer(self, count: int) -> None:
        for _ in range(count):
            item = self.fresh()
            assert self.queue.offer(item) is self.model.offer(item)

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        items = [self.fresh() for _ in range(count)]

        async def put() -> None:
            for item in items:
                self.senders[item] = asyncio.create_task(self.queue.put(item))
            await others_run()

        self.runner.run(put())
        for item in items:
            self.model.put(item)

    @rule(count=st.integers(0, 4))
    def offer_all(self, count: int) -> None:
        items = [self.fresh() for _ in range(count)]
        assert self.queue.offer_all(items) == self.model.offer_all(items)

    @rule(limit=st.integers(0, 9), data=st.data(), newcomers=st.integers(0, 2), is_first=st.booleans())
    def take(self, limit: int, data: st.DataObject, newcomers: int, is_first: bool) -> None:
        """Taking, while others give up or come along before those who wait could run."""
        cancelled = data.draw(st.sets(st.sampled_from(self.model.line))) if self.model.line else set()
        items = [self.fresh() for _ in range(newcomers)]

        async def take() -> list[int]:
            if is_first:
                self.cancel(cancelled)
            taken = self.queue.take(limit)
            if not is_first:
                self.cancel(cancelled)
            for item in items:
                self.senders[item] = asyncio.create_task(self.queue.put(item))
            await others_run()
            return taken

        taken = self.runner.run(take())
        assert taken == self.model.take(limit, cancelled)
        for item in items:
            self.model.put(item)

    def cancel(self, items: set[int]) -> None:
        for item in items:
            self.senders.pop(item).cancel()

    @rule(reopens=st.booleans())
    def close(self, reopens: bool) -> None:
        async def close() -> None:
            self.queue.close()
            if reopens:
                self.queue.reopen()
            await others_run()

        self.runner.run(close())
        self.model.close()
        self.model.is_closed = not reopens

    @rule()
    def reopen(self) -> None:
        self.queue.reopen()
        self.model.is_closed = False

    @rule(seconds=st.sampled_from([0.25, 1, 2, 4]))
    def advance(self, seconds: float) -> None:
        self.time.advance(seconds)
        self.model.now += seconds

    @invariant()
    def they_agree(self) -> None:
        assert len(self.queue) == len(self.model.items)
        assert self.queue.is_high == self.model.is_high
        assert self.queue.rate == self.model.rate.rate
        assert (self.gone, self.pressure) == (self.model.gone, self.model.pressure)
        assert [item for item, sender in self.senders.items() if not sender.done()] == self.model.line
        for item, sender in self.senders.items():
            assert not sender.done() or sender.result() is self.model.verdicts[item]

    @invariant()
    def the_counts_add_up(self) -> None:
        assert self.queue.counts == self.model.counts
        assert adds_up(self.queue, offered=len(self.model.verdicts))

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()
            assert self.queue.take(99) == self.model.items


QueueAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueAgainstModel = QueueAgainstModel.TestCase
