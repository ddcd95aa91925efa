"""The post: a journal with its subscriptions, their cursors, dead letters and retention, over several lives."""

import asyncio
import logging
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from tests.delivery.fakes import Hand, MemoryJournal, turns, until

import raydispatch.delivery.post as post_module
from raydispatch.delivery.consumer import Verdict, verdict_of
from raydispatch.delivery.journal import Change, open_journal
from raydispatch.delivery.letters import LetterFilter
from raydispatch.delivery.log import RETRY_SECONDS
from raydispatch.delivery.post import CURSORS, TRIM_SECONDS, Post
from raydispatch.delivery.reader import envelope_of
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import Rules, Start, Subscription
from raydispatch.delivery.window import Cursor
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter, JournalCorrupt, JournalUnavailable, NotRegistered
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import Delivery, JournalSettings, RetrySettings
from raydispatch.testing.clock import FakeClock

TOPIC = "dev.order.events.v1"
WALL = 1_800_000_000.0
CURSOR_SECONDS = 5.0
ONCE = Rules(Delivery(), RetrySettings(tries=1))
RELIABLE = Rules(Delivery(), RetrySettings(first_delay_seconds=0))
LIVE = Rules(Delivery.shared())
FAILED = verdict_of(
    Outcome(
        "elsewhere",
        DispatchStatus.DISPATCHER_ERROR,
        "route",
        error_code=ErrorCode.HANDLER_EXCEPTION,
        error_type="OSError",
        error_message="no disk",
    )
)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


class House:
    """A journal in memory that outlives its posts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal, self.clock = MemoryJournal(), FakeClock()
        self.journal.now = self.wall
        self.number = 0

        async def open_memory(url: str, name: str) -> MemoryJournal:
            self.opened = (url, name)
            return self.journal

        monkeypatch.setattr(post_module, "open_journal", open_memory)

    def wall(self) -> float:
        return WALL + self.clock.now()

    async def open(self, **chosen: Any) -> Post:
        settings = JournalSettings(url="sqlite:///x.db", cursor_seconds=CURSOR_SECONDS, **chosen)
        return await Post.open(settings, "orders", clock=self.clock, wall=self.wall, table_version=lambda: "v7")

    async def publish(self, post: Post, count: int = 1) -> None:
        envelopes = []
        for _ in range(count):
            envelopes.append(Envelope(self.number, topic=TOPIC, message_id=UUID(int=self.number)))
            self.number += 1
        await post.append(Segment.of([(TOPIC, envelope) for envelope in envelopes]))

    def cursor(self, name: str = "billing") -> Cursor:
        return Cursor.unpack(self.journal.buckets[CURSORS][name])

    async def kill(self, post: Post) -> None:
        """As a process that is killed: nothing more is written."""
        assert post._upkeep is not None
        tasks = [post._upkeep, *post._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for subscription in post.subscriptions.values():
            subscription.end()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


async def subscribe(
    post: Post, name: str = "billing", rules: Rules = RELIABLE, start: Start | None = None
) -> Subscription:
    return await post.subscribe(name, rules, lambda topic, _: "route", start)


def payloads(hand: Hand) -> list[Any]:
    return [envelope_of(item).payload for item in hand.seen]


# Subscribing


def test_a_post_opens_the_journal_of_its_settings(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await post.close()

        assert house.opened == ("sqlite:///x.db", "orders") or house.opened[1] == "orders"
        assert house.journal.closes == 1

    run(story())


def test_a_new_subscription_begins_with_what_comes_from_now_on(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await house.publish(post, 3)
        subscription = await subscribe(post)
        hand = Hand(acks=True)
        subscription.join(hand)

        await house.publish(post, 2)
        await until(lambda: len(hand.seen) == 2)

        assert payloads(hand) == [3, 4]
        await post.close()

    run(story())


@pytest.mark.parametrize(
    ("start", "offsets"),
    [
        ("first", [2, 3, 4, 5]),
        ("head", []),
        (0, [2, 3, 4, 5]),
        (3, [3, 4, 5]),
        (99, []),
        (datetime.fromtimestamp(WALL + 10, UTC), [4, 5]),
        (datetime.fromtimestamp(WALL - 10, UTC), [2, 3, 4, 5]),
        (datetime.fromtimestamp(WALL + 99, UTC), []),
    ],
)
def test_a_new_subscription_may_begin_anywhere(house: House, start: Start, offsets: list[int]) -> None:
    async def story() -> None:
        post = await house.open()
        await house.publish(post, 2)
        await house.publish(post, 2)
        await house.clock.advance(20)
        await house.publish(post, 2)
        await house.journal.trim(2)

        subscription = await subscribe(post, start=start)
        hand = Hand(acks=True)
        subscription.join(hand)
        await until(lambda: subscription.window.position == 6)
        await turns()

        assert hand.offsets == offsets
        await post.close()

    run(story())


@pytest.mark.parametrize("start", [-1, "tail", 1.5, True, b"first"])
def test_another_start_is_a_mistake(house: House, start: Any) -> None:
    async def story() -> None:
        post = await house.open()

        with pytest.raises(InvalidParameter, match="'first', 'head', an offset or a datetime"):
            await subscribe(post, start=start)

        assert post.subscriptions == {}
        await post.close()

    run(story())


def test_a_name_is_taken_once(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await subscribe(post)

        with pytest.raises(InvalidParameter, match="'billing'"):
            await subscribe(post)

        await post.close()

    run(story())


def test_a_name_is_taken_once_even_if_two_come_at_the_same_time(house: House) -> None:
    async def story() -> None:
        house.journal.turns = 3
        post = await house.open()

        ended = await asyncio.gather(subscribe(post), subscribe(post), return_exceptions=True)

        assert sorted(type(one).__name__ for one in ended) == ["InvalidParameter", "Subscription"]
        await post.close()

    run(story())


def test_a_subscription_exists_from_the_moment_it_was_made(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await subscribe(post)
        await house.kill(post)

        post = await house.open()
        await house.publish(post, 2)
        hand = Hand(acks=True)
        (await subscribe(post, start="head")).join(hand)
        await until(lambda: len(hand.seen) == 2)

        await post.close()

    run(story())


def test_a_subscription_goes_on_where_it_was_whatever_start_is_given(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)
        await post.close()

        post = await house.open()
        await house.publish(post, 2)
        (await subscribe(post, start="first")).join(hand)
        await until(lambda: len(hand.seen) == 5)
        await post.close()

        assert payloads(hand) == [0, 1, 2, 3, 4]
        assert {item.deliveries for item in hand.seen} == {0}

    run(story())


def test_after_an_end_in_order_nothing_comes_twice(house: House) -> None:
    async def story() -> None:
        seen = []
        for _ in range(4):
            post = await house.open()
            hand = Hand(acks=True)
            subscription = await subscribe(post)
            subscription.join(hand)
            await house.publish(post, 5)
            await until(lambda: subscription.window.safe == post.log.head)  # noqa: B023
            await post.close()
            seen += hand.seen

        assert [item.entry.offset for item in seen] == list(range(20))
        assert {item.deliveries for item in seen} == {0}

    run(story())


def test_one_that_is_not_reliable_gets_nothing_from_before_its_start(house: House) -> None:
    async def story() -> None:
        for _ in range(2):
            post = await house.open()
            await house.publish(post, 2)
            hand = Hand()
            (await subscribe(post, rules=LIVE)).join(hand)
            await house.publish(post, 1)
            await until(lambda: hand.seen)  # noqa: B023
            await turns()
            assert len(hand.seen) == 1
            await post.close()

        assert CURSORS not in house.journal.buckets

    run(story())


def test_subscriptions_are_told_of(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await subscribe(post, "billing")
        await subscribe(post, "mailing", LIVE)
        await house.publish(post, 3)
        await turns()

        statuses = {status.name: (status.reliable, status.lag) for status in post.statuses()}

        assert statuses == {"billing": (True, 3), "mailing": (False, 3)}
        await post.close()

    run(story())


# Ending one


def test_a_subscription_that_ends_keeps_its_place(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 2)
        await until(lambda: len(hand.seen) == 2)

        await post.unsubscribe("billing")
        await house.publish(post, 2)
        (await subscribe(post)).join(hand)
        await until(lambda: len(hand.seen) == 4)

        assert payloads(hand) == [0, 1, 2, 3]
        await post.close()

    run(story())


def test_what_its_consumers_had_comes_again(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        first, second = Hand(), Hand(acks=True)
        (await subscribe(post)).join(first)
        await house.publish(post, 3)
        await until(lambda: len(first.holds) == 3)
        first.say_of(1)

        drained = await post.unsubscribe("billing")
        (await subscribe(post)).join(second)
        await until(lambda: len(second.seen) == 2)

        assert not drained
        assert second.offsets == [0, 2]
        assert all(item.deliveries >= 1 for item in second.seen)
        await post.close()

    run(story())


def test_its_consumers_may_end_what_they_have(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.holds) == 3)

        ending = asyncio.ensure_future(post.unsubscribe("billing", seconds=5))
        await turns()
        hand.say()

        assert await ending
        assert house.cursor() == Cursor(3, (), 3)
        await post.close()

    run(story())


def test_one_that_is_to_be_forgotten_leaves_nothing(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await subscribe(post)
        await house.publish(post, 2)

        await post.unsubscribe("billing", forget=True)
        hand = Hand(acks=True)
        assert house.journal.buckets[CURSORS] == {}
        (await subscribe(post)).join(hand)
        await turns()

        assert hand.seen == []
        await post.close()

    run(story())


def test_there_is_nothing_to_end_where_nothing_began(house: House) -> None:
    async def story() -> None:
        post = await house.open()

        for ending in (post.unsubscribe("nobody"), post.replay("nobody", "first")):
            with pytest.raises(NotRegistered, match="'nobody'"):
                await ending

        await post.close()

    run(story())


def test_two_may_end_it_at_the_same_time(house: House) -> None:
    async def story() -> None:
        house.journal.turns = 2
        post = await house.open()
        hand = Hand()
        (await subscribe(post)).join(hand)
        await house.publish(post)
        await until(lambda: hand.holds)

        ending = asyncio.gather(post.unsubscribe("billing", seconds=1), post.close(1), return_exceptions=True)
        await turns(4)
        hand.say()
        drained, closed = await ending

        assert (drained, closed) == (True, True)

    run(story())


# Cursors


def test_cursors_are_kept_now_and_then(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)
        before = house.cursor()

        await house.clock.advance(CURSOR_SECONDS)
        await turns()

        # Three are delivered before they are settled: the cursor then says that they may have been.
        assert (before.position, len(before.open)) == (3, 3)
        assert (house.cursor().position, house.cursor().open) == (3, ())
        await post.close()

    run(story())


def test_a_cursor_that_did_not_move_is_not_written_again(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post)
        await until(lambda: hand.seen)
        await house.clock.advance(CURSOR_SECONDS)
        await turns()
        writes = house.journal.writes

        await house.clock.advance(10 * CURSOR_SECONDS)

        assert house.journal.writes == writes
        await post.close()

    run(story())


def test_the_cursor_of_one_that_began_again_is_kept_too(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        first, second = Hand(), Hand()
        (await subscribe(post)).join(first)
        await house.publish(post, 4)
        await until(lambda: len(first.holds) == 4)
        first.say(count=2)
        await house.clock.advance(CURSOR_SECONDS)
        await post.unsubscribe("billing")
        (await subscribe(post)).join(second)
        await until(lambda: len(second.holds) == 2)

        second.say()
        await house.clock.advance(2 * CURSOR_SECONDS)
        await turns()

        assert house.cursor().open == ()
        await post.close()

    run(story())


def test_after_a_crash_only_what_was_done_since_the_last_cursor_comes_again(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)
        await house.clock.advance(CURSOR_SECONDS)
        await house.publish(post, 2)
        await until(lambda: len(hand.seen) == 5)
        await house.kill(post)

        post = await house.open()
        again = Hand(acks=True)
        (await subscribe(post)).join(again)
        await until(lambda: len(again.seen) == 2)
        await turns()

        assert payloads(again) == [3, 4]
        assert all(envelope_of(item).attempt > 1 for item in again.seen)
        await post.close()

    run(story())


def test_a_journal_that_is_away_for_a_while_keeps_cursors_later(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)

        house.journal.away = True
        await house.clock.advance(3 * CURSOR_SECONDS)
        house.journal.away = False
        await house.clock.advance(RETRY_SECONDS)
        await turns()

        assert house.cursor().open == ()
        await post.close()

    run(story())


def test_a_cursor_that_cannot_be_read_is_told_of_at_the_start(house: House) -> None:
    async def story() -> None:
        await house.journal.write([Change(CURSORS, "billing", b"\xc1")])

        with pytest.raises(JournalCorrupt):
            await house.open()

        assert house.journal.closes == 1

    run(story())


def test_a_journal_that_is_away_at_the_start_is_told_of(house: House) -> None:
    async def story() -> None:
        house.journal.away = True

        with pytest.raises(JournalUnavailable):
            await house.open()

        assert house.journal.closes == 1

    run(story())


def test_an_error_in_the_upkeep_does_not_end_it(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post)
        await until(lambda: hand.seen)
        write = house.journal.write

        async def broken(changes: Any) -> None:
            house.journal.write = write  # type: ignore[method-assign]
            raise JournalCorrupt("as the test wants it")

        house.journal.write = broken  # type: ignore[method-assign]
        await house.clock.advance(3 * CURSOR_SECONDS)
        await turns()
        if post._upkeep is not None and post._upkeep.done():
            post._upkeep.exception()

        assert house.cursor().open == ()
        await post.close()

    run(story())


# Replay


def test_a_replay_begins_anew_and_the_consumers_stay(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 4)
        await until(lambda: len(hand.seen) == 4)

        offset = await post.replay("billing", 2)
        await until(lambda: len(hand.seen) == 6)
        await house.publish(post, 1)
        await until(lambda: len(hand.seen) == 7)

        assert (offset, payloads(hand)) == (2, [0, 1, 2, 3, 2, 3, 4])
        await post.close()

    run(story())


def test_a_replay_may_go_forward(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        await subscribe(post)
        await house.publish(post, 4)

        assert await post.replay("billing", "head") == 4
        hand = Hand(acks=True)
        post.subscriptions["billing"].join(hand)
        await turns()

        assert (hand.seen, post.statuses()[0].lag) == ([], 0)
        await post.close()

    run(story())


def test_a_replay_survives_a_crash(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)
        post.subscriptions["billing"].leave("hand")

        await post.replay("billing", "first")
        await house.kill(post)
        post = await house.open()
        again = Hand(acks=True)
        (await subscribe(post)).join(again)
        await until(lambda: len(again.seen) == 3)

        await post.close()

    run(story())


def test_a_word_on_what_came_before_the_replay_does_not_count(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post)).join(hand)
        await house.publish(post, 1)
        await until(lambda: hand.holds)
        (item, tell) = hand.holds.pop()

        await post.replay("billing", "first")
        tell("hand", [item], [verdict_of(Outcome("x", DispatchStatus.SUCCESS))])
        await until(lambda: hand.holds)

        assert post.subscriptions["billing"].window.safe == 0
        await post.close()

    run(story())


def test_the_upkeep_does_not_undo_a_replay(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 3)
        await until(lambda: len(hand.seen) == 3)
        hand.acks = False

        # The upkeep has begun to keep the cursor, and the journal is away for a moment.
        house.journal.away = True
        await house.clock.advance(CURSOR_SECONDS)
        house.journal.away = False
        replaying = asyncio.ensure_future(post.replay("billing", "first"))
        await turns()
        await house.clock.advance(RETRY_SECONDS)
        await replaying
        await turns()

        assert (house.cursor().position, house.cursor().open) == (0, ()) or len(house.cursor().open) == 3
        await post.close()

    run(story())


# Dead letters


def test_what_a_subscription_gives_up_is_a_letter_with_all_that_is_known(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post, rules=Rules(Delivery(), RetrySettings(tries=2, first_delay_seconds=0)))).join(hand)
        await house.publish(post)
        for _ in range(2):
            await until(lambda: hand.holds)
            hand.say(FAILED)
        await until(lambda: house.journal.buckets.get("letters"))

        (letter,) = [one async for one in post.letters.find()]

        outcome, envelope = letter.outcome, letter.envelope
        assert (outcome.dispatcher_id, outcome.status, outcome.attempts) == (
            "billing",
            DispatchStatus.DISPATCHER_ERROR,
            2,
        )
        assert (outcome.error_type, outcome.error_message) == ("OSError", "no disk")
        assert (letter.topic, envelope.payload, envelope.attempt) == (TOPIC, 0, 2)
        assert (letter.last_at, letter.table_version) == (datetime.fromtimestamp(house.wall(), UTC), "v7")
        await post.close()

    run(story())


def test_a_letter_knows_when_the_message_failed_for_the_first_time(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post, rules=Rules(Delivery(), RetrySettings(tries=2, first_delay_seconds=0)))).join(hand)
        await house.publish(post)
        await until(lambda: hand.holds)
        hand.say(FAILED)
        await until(lambda: hand.holds)
        await house.clock.advance(60)
        hand.say(FAILED)
        await until(lambda: house.journal.buckets.get("letters"))

        (letter,) = [one async for one in post.letters.find()]

        assert (letter.last_at - letter.first_at).total_seconds() >= 60
        await post.close()

    run(story())


def test_a_letter_that_is_redriven_comes_to_the_one_that_failed_only(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        bad, good = Hand("bad"), Hand("good", acks=True)
        (await subscribe(post, "billing", ONCE)).join(bad)
        (await subscribe(post, "mailing", ONCE)).join(good)
        await house.publish(post)
        await until(lambda: bad.holds)
        bad.say(FAILED)
        await until(lambda: house.journal.buckets.get("letters"))

        count = await post.letters.redrive(LetterFilter(dispatcher_id="billing"))
        await until(lambda: bad.holds)
        bad.say()
        await until(lambda: all(status.lag == 0 for status in post.statuses()))

        assert (count, len(bad.seen), len(good.seen)) == (1, 2, 1)
        assert envelope_of(bad.seen[1]).message_id == envelope_of(bad.seen[0]).message_id
        assert envelope_of(bad.seen[1]).attempt == 2
        assert await post.letters.count() == 0
        await post.close()

    run(story())


def test_a_message_that_fails_again_is_a_letter_again(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post, rules=ONCE)).join(hand)
        await house.publish(post)
        for attempt in range(1, 4):
            await until(lambda: hand.holds)
            hand.say(FAILED)
            await until(lambda: house.journal.buckets.get("letters"))
            (letter,) = [one async for one in post.letters.find()]
            assert letter.envelope.attempt == attempt
            await post.letters.redrive()

        await post.close()

    run(story())


# Retention


def test_what_is_old_and_done_is_let_go_of(house: House) -> None:
    async def story() -> None:
        post = await house.open(keep_seconds=100)
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post, 2)
        await until(lambda: len(hand.seen) == 2)

        await house.clock.advance(90)
        kept = len(house.journal.batches)
        await house.publish(post, 1)
        await house.clock.advance(TRIM_SECONDS + CURSOR_SECONDS)
        await turns()

        assert kept == 1
        assert [one.first for one in house.journal.batches] == [2]
        await post.close()

    run(story())


def test_what_is_not_done_is_kept_however_old_it_is(house: House) -> None:
    async def story() -> None:
        post = await house.open(keep_seconds=0)
        slow, fast = Hand("slow"), Hand("fast", acks=True)
        (await subscribe(post, "billing")).join(slow)
        (await subscribe(post, "mailing")).join(fast)
        for _ in range(3):
            await house.publish(post)
        await until(lambda: len(slow.holds) == 3)
        slow.say_of(0)
        slow.say_of(2)

        await house.clock.advance(3 * TRIM_SECONDS)
        await turns()

        assert [one.first for one in house.journal.batches] == [1, 2]
        await post.close()

    run(story())


def test_what_a_reader_that_is_away_has_not_read_is_kept(house: House) -> None:
    async def story() -> None:
        post = await house.open(keep_seconds=0)
        await subscribe(post, "feed")
        await post.unsubscribe("feed")
        await house.publish(post, 2)

        await house.clock.advance(3 * TRIM_SECONDS)
        await turns()

        assert [one.count for one in house.journal.batches] == [2]
        await post.close()

    run(story())


# Closing


def test_closing_waits_for_what_is_under_way_and_keeps_all_cursors(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hands = [Hand("a"), Hand("b")]
        for name, hand in zip(("billing", "mailing"), hands, strict=True):
            (await subscribe(post, name)).join(hand)
        await house.publish(post, 2)
        await until(lambda: all(hand.holds for hand in hands))

        closing = asyncio.ensure_future(post.close(5))
        await turns()
        for hand in hands:
            hand.say()

        assert await closing
        assert [house.cursor(name) for name in ("billing", "mailing")] == [Cursor(2, (), 2)] * 2
        assert house.journal.closes == 1

    run(story())


def test_closing_leaves_what_does_not_end_for_the_next_life(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        (await subscribe(post)).join(hand)
        await house.publish(post, 2)
        await until(lambda: hand.holds)

        assert not await post.close()

        assert [offset for offset, _, _ in house.cursor().open] == [0, 1]

    run(story())


def test_a_journal_that_is_away_does_not_hold_up_the_end_for_ever(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_module, "CLOSE_SECONDS", 0.05)

    async def story() -> None:
        post = await house.open()
        hand = Hand(acks=True)
        (await subscribe(post)).join(hand)
        await house.publish(post)
        await until(lambda: hand.seen)
        house.journal.away = True

        await post.close()

        assert house.journal.closes == 1

    run(story())


def test_nothing_of_it_runs_after_the_end(house: House) -> None:
    async def story() -> None:
        before = asyncio.all_tasks()
        post = await house.open()
        for name in ("a", "b"):
            (await subscribe(post, name)).join(Hand())
        await house.publish(post)
        await turns()

        await post.close()
        await turns()

        assert asyncio.all_tasks() == before

    run(story())


def test_a_subscription_that_breaks_is_told_of(house: House, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        post = await house.open()

        def broken(topic: str, message_type: str) -> str | None:
            raise ZeroDivisionError("as the test wants it")

        subscription = await post.subscribe("billing", RELIABLE, broken)
        subscription.join(Hand())
        await house.publish(post)
        await turns()
        await post.close()

    with caplog.at_level(logging.ERROR, "raydispatch"):
        run(story())
    (record,) = caplog.records
    assert record.message == "subscription ended"
    assert record.__dict__["error"] == "ZeroDivisionError: as the test wants it"


# Opening journals


@pytest.mark.parametrize("url", ["", "orders.db", "http://host", "postgres://host/db", "file:///x"])
def test_an_address_of_no_journal_is_refused(url: str) -> None:
    with pytest.raises(InvalidParameter, match=r"sqlite:///.*nats://"):
        asyncio.run(open_journal(url, "orders"))


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(InvalidParameter) as caught:
        asyncio.run(open_journal("http://user:hunter2@host:4222", "orders"))

    assert "hunter2" not in str(caught.value)


def test_a_verdict_may_have_a_delay_of_its_own(house: House) -> None:
    async def story() -> None:
        post = await house.open()
        hand = Hand()
        subscription = await subscribe(post)
        subscription.join(hand)
        await house.publish(post)
        await until(lambda: hand.holds)

        hand.say(Verdict(FAILED.ending, FAILED.outcome, 30.0))
        await house.clock.advance(29)
        subscription.poke()
        await turns()
        assert hand.held == []
        await house.clock.advance(1)
        subscription.poke()
        await until(lambda: hand.holds)

        await post.close()

    run(story())
