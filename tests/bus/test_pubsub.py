"""Publish and subscribe: who gets what, what the slow ones miss, and how it ends."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.bus import pubsub
from raydispatch.bus.pubsub import Subscription, Subscriptions
from raydispatch.errors import InvalidParameter, InvalidPattern, InvalidState
from raydispatch.messages.envelope import Envelope

T = TypeVar("T")

segment_texts = st.sampled_from(["a", "b", "c", "A", "*", "**", "**", "a*", "?b", "[ab]c", "[!a]"])
globs = st.lists(segment_texts, min_size=1, max_size=4).map(".".join)
regexes = st.sampled_from(["regex:a.*", "regex:A\\.(b|c)", "regex:.*[bc]", "regex:a|b", "regex:(a\\.)*c"])
topics = st.lists(st.sampled_from(["a", "b", "c", "B", "ab", "ac", "bc", ""]), min_size=1, max_size=4).map(".".join)
subscribing = st.tuples(st.just("subscribe"), globs | globs | globs | regexes)
unsubscribing = st.tuples(st.just("unsubscribe"), st.integers(0, 20))
publishing = st.tuples(st.just("publish"), topics)


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 5))


async def asleep(subscription: Subscription, reading: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A reader that has found nothing, and waits."""
    reader = asyncio.get_running_loop().create_task(reading)
    await asyncio.sleep(0)
    assert subscription._sleeper is not None
    return reader


async def take(subscription: Subscription, count: int) -> list[Any]:
    return [(await anext(subscription)).payload for _ in range(count)]


async def rest(subscription: Subscription) -> list[Any]:
    """What is still queued, for a subscription that has ended."""
    return [envelope.payload async for envelope in subscription]


def publish(subscriptions: Subscriptions, *payloads: object, topic: str = "a") -> list[int]:
    return [subscriptions.deliver(topic, Envelope(payload)) for payload in payloads]


def fits(pattern: str, topic: str) -> bool:
    """A plain translation for `topic + "."`; it shares nothing with the library."""
    if "" in topic.split("."):
        return False
    if pattern.startswith("regex:"):
        expression = f"(?:{pattern.removeprefix('regex:')})\\."
    else:
        wildcards = {"**": r"(?:[^.]+\.)*", "*": r"[^.]+\."}
        expression = "".join(
            wildcards.get(segment) or segment.replace("[!", "[^.").replace("?", "[^.]").replace("*", "[^.]*") + r"\."
            for segment in pattern.lower().split(".")
        )
    return re.fullmatch(expression, f"{topic}.", re.IGNORECASE) is not None


@given(st.lists(subscribing | unsubscribing | publishing | publishing, max_size=30), st.sampled_from([0, 1, 64]))
@settings(max_examples=300, deadline=None)
def test_a_message_reaches_exactly_those_whose_pattern_fits(steps: list[tuple[str, Any]], few: int) -> None:
    subscriptions = Subscriptions()
    expected: dict[Subscription, list[int]] = {}
    gone: dict[Subscription, list[int]] = {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pubsub, "_FEW_EMPTY_LEAVES", few)
        for number, (verb, what) in enumerate(steps):
            if verb == "subscribe":
                expected[subscriptions.subscribe(what)] = []
            elif verb == "unsubscribe" and expected:
                leaving = list(expected)[what % len(expected)]
                gone[leaving] = expected.pop(leaving)
                leaving.unsubscribe()
            elif verb == "publish":
                fitting = [one for one in expected if fits(one.pattern, what)]
                assert subscriptions.would_deliver(what) == bool(fitting)
                assert subscriptions.deliver(what, Envelope(number)) == len(fitting)
                for one in fitting:
                    expected[one].append(number)
            assert len(subscriptions) == len(expected)
            assert subscriptions._empty_leaves == sum(not leaf.subscriptions for leaf in subscriptions._leaves)

    subscriptions.close()
    for subscription, numbers in {**expected, **gone}.items():
        assert run(rest(subscription)) == numbers
        assert (subscription.delivered, subscription.missed) == (len(numbers), 0)


def test_the_envelope_tells_where_it_was_published() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("dev.**")
        sent = Envelope("hello")

        subscriptions.deliver("Dev.Order", sent)
        subscriptions.deliver("dev.x", addressed := Envelope("again", topic="dev.x"))

        first, second = await anext(subscription), await anext(subscription)
        assert (first.topic, first.message_id) == ("Dev.Order", sent.message_id)
        assert second is addressed

    run(test())


def test_a_message_for_nobody_is_not_even_copied() -> None:
    subscriptions = Subscriptions()
    subscriptions.subscribe("b")

    assert subscriptions.deliver("a", None) == 0  # type: ignore[arg-type]
    assert subscriptions.deliver("a" * 501, None) == 0  # type: ignore[arg-type]
    assert Subscriptions().deliver("a", None) == 0  # type: ignore[arg-type]
    assert not Subscriptions().would_deliver("a")


def test_subscribers_of_one_pattern_all_get_the_message() -> None:
    subscriptions = Subscriptions()
    several = [subscriptions.subscribe(pattern) for pattern in ("a.*", "A.*", "a.*")]

    assert publish(subscriptions, "x", topic="a.b") == [3]
    several[1].unsubscribe()
    assert publish(subscriptions, "y", topic="a.b") == [2]

    assert [one.pending for one in several] == [2, 1, 2]


@pytest.mark.parametrize("pattern", ["", "a..b", "a.b**", "[", "regex:("])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    subscriptions = Subscriptions()

    with pytest.raises(InvalidPattern):
        subscriptions.subscribe(pattern)

    assert len(subscriptions) == 0


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, "1"])
def test_a_bad_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(InvalidParameter, match="capacity"):
        Subscriptions().subscribe("a", capacity)


def test_a_pattern_must_be_text() -> None:
    with pytest.raises(InvalidParameter, match="not int"):
        Subscriptions().subscribe(7)  # type: ignore[arg-type]


def test_a_slow_subscriber_misses_the_newest_and_holds_up_nobody() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        slow, fast = subscriptions.subscribe("a", 2), subscriptions.subscribe("*")

        assert publish(subscriptions, 1, 2, 3, 4) == [2, 2, 1, 1]
        assert (slow.delivered, slow.missed, slow.pending, slow.capacity) == (2, 2, 2, 2)

        assert (await anext(slow)).payload == 1
        assert publish(subscriptions, 5) == [2]
        subscriptions.close()
        assert await rest(slow) == [2, 5]
        assert await rest(fast) == [1, 2, 3, 4, 5]

    run(test())


def test_a_slow_subscriber_is_told_how_many_it_missed_since_the_last_time() -> None:
    async def test() -> None:
        told: list[int] = []
        subscriptions = Subscriptions()
        slow = subscriptions.subscribe("a", 2, on_missed=told.append)

        publish(subscriptions, 1, 2, 3, 4, 5)
        assert told == []
        await anext(slow)
        assert told == [3]
        await anext(slow)
        assert told == [3]
        publish(subscriptions, 6, 7, 8)
        await anext(slow)

        assert told == [3, 1]
        assert slow.missed == 4

    run(test())


def test_a_reader_woken_for_the_first_message_is_told_of_those_that_came_before_it_was_up() -> None:
    async def test() -> None:
        told: list[int] = []
        subscriptions = Subscriptions()
        slow = subscriptions.subscribe("a", 1, on_missed=told.append)
        reader = await asleep(slow, take(slow, 1))

        assert publish(subscriptions, 1, 2, 3) == [1, 0, 0]

        assert await reader == [1]
        assert told == [2]

    run(test())


def test_an_on_missed_that_raises_costs_no_message() -> None:
    def complain(missed: int) -> None:
        raise ValueError(f"{missed} missed")

    async def test() -> None:
        subscriptions = Subscriptions()
        slow = subscriptions.subscribe("a", 1, on_missed=complain)
        publish(subscriptions, 1, 2)

        with pytest.raises(ValueError, match="1 missed"):
            await anext(slow)

        assert (await anext(slow)).payload == 1

    run(test())


def test_a_gap_is_logged_once_until_the_reader_has_caught_up(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        slow = subscriptions.subscribe("a.*", 2)
        publish(subscriptions, 1, 2, 3, 4, topic="a.b")
        assert len(caplog.records) == 1

        await anext(slow)
        publish(subscriptions, 5, 6, topic="a.b")
        assert len(caplog.records) == 1

        await anext(slow)
        await anext(slow)
        publish(subscriptions, 7, 8, 9, 10, topic="a.b")
        assert len(caplog.records) == 2

    with caplog.at_level(logging.WARNING, logger="raydispatch"):
        run(test())

    assert [record.getMessage() for record in caplog.records] == ["subscriber is too slow"] * 2
    fields = [{name: vars(record)[name] for name in ("pattern", "missed")} for record in caplog.records]
    assert fields == [{"pattern": "a.*", "missed": 1}, {"pattern": "a.*", "missed": 4}]


def test_after_unsubscribing_the_rest_is_read_and_then_it_ends() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        publish(subscriptions, 1, 2)

        subscription.unsubscribe()
        subscription.unsubscribe()

        assert publish(subscriptions, 3) == [0]
        assert len(subscriptions) == 0
        assert await rest(subscription) == [1, 2]
        assert await rest(subscription) == []

    run(test())


def test_leaving_the_block_unsubscribes() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()

        async with subscriptions.subscribe("a") as subscription:
            publish(subscriptions, 1, 2)
            async for envelope in subscription:
                assert envelope.payload == 1
                break

        assert len(subscriptions) == 0
        assert await rest(subscription) == [2]

    run(test())


@pytest.mark.parametrize(
    "end", [lambda subscriptions, one: one.unsubscribe(), lambda subscriptions, one: subscriptions.close()]
)
def test_a_reader_that_waits_is_woken_by_the_end(end: Callable[[Subscriptions, Subscription], None]) -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        reader = await asleep(subscription, rest(subscription))

        end(subscriptions, subscription)

        assert await reader == []

    run(test())


@pytest.mark.parametrize("ends", [True, False])
def test_what_happens_while_a_reader_lies_down_is_not_slept_through(ends: bool) -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        loop = asyncio.get_running_loop()

        def happen_first() -> asyncio.Future[Any]:
            del loop.create_future
            if ends:
                subscription.unsubscribe()
            else:
                publish(subscriptions, 1)
            return loop.create_future()

        # As another thread might, between the look into the queue and the sleep.
        loop.create_future = happen_first  # type: ignore[method-assign]

        assert await anext(subscription, None) is None if ends else await take(subscription, 1) == [1]

    run(test())


def test_a_publisher_that_was_under_way_comes_too_late_for_the_ended() -> None:
    subscription = Subscriptions().subscribe("a")
    subscription.unsubscribe()

    assert not subscription._offer(Envelope(1))

    assert (subscription.delivered, subscription.missed, subscription.pending) == (0, 0, 0)


def test_a_second_reader_is_refused_while_the_first_waits() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        reader = await asleep(subscription, take(subscription, 1))

        with pytest.raises(InvalidState, match="one at a time"):
            await anext(subscription)

        publish(subscriptions, 1, 2)
        assert await reader == [1]
        assert (await anext(subscription)).payload == 2

    run(test())


@pytest.mark.parametrize("published_before", [True, False])
def test_a_cancelled_reader_loses_no_message(published_before: bool) -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        reader = await asleep(subscription, take(subscription, 1))

        if published_before:
            publish(subscriptions, 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        if not published_before:
            publish(subscriptions, 1)

        assert (await anext(subscription)).payload == 1

    run(test())


def test_messages_from_other_threads_all_arrive_in_each_threads_order() -> None:
    threads, each = 4, 500

    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("t.*", threads * each)

        def publish_all(thread: int) -> None:
            publish(subscriptions, *((thread, number) for number in range(each)), topic=f"t.{thread}")

        workers = [threading.Thread(target=publish_all, args=(number,)) for number in range(threads)]
        reader = await asleep(subscription, take(subscription, threads * each))
        for worker in workers:
            worker.start()

        taken = await reader
        for thread in range(threads):
            assert [number for origin, number in taken if origin == thread] == list(range(each))
        for worker in workers:
            worker.join(5)

    run(test())


def test_a_queue_never_grows_beyond_its_capacity_however_many_threads_publish() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.subscribe("a", 10)
    taken: list[int] = []

    def publish_all() -> None:
        taken.append(sum(publish(subscriptions, *range(1_000))))

    workers = [threading.Thread(target=publish_all) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(5)

    assert (subscription.pending, sum(taken), subscription.delivered, subscription.missed) == (10, 10, 10, 7_990)


def test_the_end_may_come_from_another_thread() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        subscription = subscriptions.subscribe("a")
        reader = await asleep(subscription, rest(subscription))

        # In this mode, a loop refuses what another thread does to it behind its back.
        asyncio.get_running_loop().set_debug(True)
        await asyncio.to_thread(subscriptions.close)

        assert await reader == []

    run(test())


def test_a_reader_whose_loop_is_closed_breaks_nothing() -> None:
    async def start_reading() -> Coroutine[Any, Any, Envelope[Any]]:
        reading = subscription.__anext__()
        reading.send(None)
        return reading

    subscriptions = Subscriptions()
    subscription = subscriptions.subscribe("a")
    reading = run(start_reading())

    assert publish(subscriptions, 1) == [1]

    reading.close()
    subscription.unsubscribe()
    assert run(rest(subscription)) == [1]


def test_subscribing_while_others_publish_never_leaves_an_old_answer_behind() -> None:
    subscriptions = Subscriptions()
    subscriptions.subscribe("**", 1)
    stop = threading.Event()

    def publish_on() -> None:
        while not stop.is_set():
            publish(subscriptions, 0)

    workers = [threading.Thread(target=publish_on) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(300):
            newcomer = subscriptions.subscribe("a", 1)
            publish(subscriptions, 1)
            assert newcomer.delivered == 1
            newcomer.unsubscribe()
    finally:
        stop.set()
        for worker in workers:
            worker.join(5)


def test_closed_subscriptions_take_new_ones_only_when_reopened() -> None:
    async def test() -> None:
        subscriptions = Subscriptions()
        before = subscriptions.subscribe("a")

        subscriptions.close()
        subscriptions.close()
        with pytest.raises(InvalidState, match="stopped"):
            subscriptions.subscribe("a")
        assert publish(subscriptions, 1) == [0]

        subscriptions.reopen()
        after = subscriptions.subscribe("a")
        assert publish(subscriptions, 2) == [1]
        assert (before.delivered, after.delivered) == (0, 1)

    run(test())


@pytest.mark.parametrize("pattern", ["t{}", "t{}.*", "**.t{}.**", "regex:t{}"])
def test_empty_leaves_do_not_pile_up(pattern: str) -> None:
    subscriptions = Subscriptions()
    staying = subscriptions.subscribe("x")

    for number in range(1_000):
        subscriptions.subscribe(pattern.format(number)).unsubscribe()
        assert len(subscriptions._leaves) <= 66

    assert publish(subscriptions, 1, topic="x") == [1]
    assert staying.pending == 1


def test_many_who_leave_at_once_leave_a_small_index() -> None:
    subscriptions = Subscriptions()
    many = [subscriptions.subscribe(f"t{number}.*") for number in range(1_000)]

    for subscription in many[1:]:
        subscription.unsubscribe()

    assert len(subscriptions._leaves) <= 66
    assert publish(subscriptions, 1, topic="t0.a") == [1]
    assert publish(subscriptions, 1, topic="t1.a") == [0]


def test_the_topics_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "_CACHED_TOPICS", 10)
    subscriptions = Subscriptions()
    subscriptions.subscribe("t.*", 1_000)

    for number in range(100):
        assert publish(subscriptions, 1, 2, topic=f"t.{number}") == [1, 1]
        assert publish(subscriptions, 1, topic="x" * (501 + number)) == [0]
        assert len(subscriptions._cache) <= 10
    assert all(len(topic) < 500 for topic in subscriptions._cache)
