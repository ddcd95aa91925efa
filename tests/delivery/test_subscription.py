"""Subscriptions: every behaviour by itself, and all of them against a model with crashes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.delivery.fakes import Hand, MemoryJournal, turns, until

import raydispatch.delivery.subscription as subscription_module
from raydispatch.delivery.consumer import ACKED, LOST, REFUSED, Ending, Item, Tell, Verdict, verdict_of
from raydispatch.delivery.journal import Change
from raydispatch.delivery.log import RETRY_SECONDS, Log
from raydispatch.delivery.reader import envelope_of
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.subscription import REFUSED_SECONDS, Rules, Subscription, Undelivered
from raydispatch.delivery.window import Cursor
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import Envelope
from raydispatch.settings import Delivery, DeliveryMode, JournalSettings, PoisonPolicy, RetrySettings
from raydispatch.testing.clock import FakeClock

TOPIC, OTHER = "dev.order.events.v1", "dev.other.events.v1"
SHARED, EXCLUSIVE, KEY_SHARED = DeliveryMode
EVERY_MODE = pytest.mark.parametrize("mode", DeliveryMode)
WALL = 1_800_000_000.0
BROKEN = Outcome("orders", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.HANDLER_EXCEPTION)
INVALID = Outcome("orders", DispatchStatus.INVALID_MESSAGE, error_code=ErrorCode.PAYLOAD_INVALID)
FAILED = verdict_of(BROKEN)
AT_ONCE = RetrySettings(tries=3, first_delay_seconds=0)


def failed_for(seconds: float) -> Verdict:
    return Verdict(Ending.FAILED, BROKEN, seconds)


class Desk:
    """A subscription over a journal in memory, and what it keeps there."""

    def __init__(self, journal: MemoryJournal | None = None, clock: FakeClock | None = None, **chosen: Any) -> None:
        self.journal = journal or MemoryJournal()
        self.clock = clock or FakeClock()
        self.settings = JournalSettings(url="sqlite:///x.db", patience_seconds=1, **chosen)
        self.log = Log(self.journal, self.settings, self.clock)
        self.cursors: list[Cursor] = []
        self.letters: list[Undelivered] = []
        self.subscription: Subscription
        self.run: asyncio.Task[None]

    async def open(
        self,
        mode: DeliveryMode = SHARED,
        *,
        window: int = 64,
        reliable: bool = True,
        per_second: float | None = None,
        retry: RetrySettings | None = AT_ONCE,
        poison: PoisonPolicy = PoisonPolicy.DEAD_LETTER,
        cursor: Cursor | None = None,
    ) -> "Desk":
        await self.log.open()
        delivery = Delivery(mode=mode, window=window, reliable=reliable, per_second=per_second)
        self.subscription = Subscription(
            "orders", Rules(delivery, retry, poison), self.log, lambda topic, _: "route" if topic == TOPIC else None,
            cursor=cursor or Cursor(), bury=self._bury, keep=self._keep, settings=self.settings, clock=self.clock,
            wall=lambda: WALL + self.clock.now(),
        )  # fmt: skip
        self.start()
        return self

    def start(self) -> None:
        self.run = asyncio.get_running_loop().create_task(self.subscription.run())
        # Looked at, so that nobody complains of it in the middle of another test.
        self.run.add_done_callback(lambda run: run.cancelled() or run.exception())

    def join(self, *hands: Hand) -> None:
        for hand in hands:
            self.subscription.join(hand)

    async def publish(
        self,
        count: int = 1,
        *,
        topic: str = TOPIC,
        keys: Sequence[str | None] = (),
        due: float | None = None,
        to: str | None = None,
    ) -> list[UUID]:
        """So many in one segment, with their numbers as payloads."""
        envelopes = [
            Envelope(self.log.head + row, topic=topic, key=keys[row] if keys else None, message_id=uuid4())
            for row in range(len(keys) or count)
        ]
        await self.log.append(
            Segment.of(
                [(topic, envelope) for envelope in envelopes],
                None if due is None else [WALL + due] * len(envelopes),
                None if to is None else [to] * len(envelopes),
            )
        )
        return [envelope.message_id for envelope in envelopes]

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        self.subscription.poke()
        await turns()

    async def stop(self) -> None:
        """As a process that is killed: nothing more is written."""
        self.run.cancel()
        await asyncio.wait((self.run,))
        self.subscription.end()

    @property
    def safe(self) -> int:
        return self.subscription.window.safe

    async def _keep(self, name: str, cursor: Cursor) -> None:
        await self.log.write([Change("cursors", name, cursor.pack())])
        self.cursors.append(cursor)

    async def _bury(self, name: str, lost: Undelivered) -> None:
        await self.log.write([Change("letters", f"{name}/{lost.item.entry.offset}", b"")])
        self.letters.append(lost)


def kept_cursor(journal: MemoryJournal) -> Cursor:
    data = journal.buckets.get("cursors", {}).get("orders")
    return Cursor.unpack(data) if data is not None else Cursor()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


# What is delivered


@EVERY_MODE
def test_what_is_published_is_delivered_in_order(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode)
        hand = Hand(acks=True)
        desk.join(hand)

        await desk.publish(3)
        await desk.publish(2)
        await until(lambda: len(hand.seen) == 5)

        assert [envelope_of(item).payload for item in hand.seen] == list(range(5))
        assert desk.safe == 5
        await desk.stop()

    run(story())


def test_an_item_says_all_that_a_consumer_needs() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)

        (message_id,) = await desk.publish(keys=["customer-1"])
        await until(lambda: hand.seen)

        (item,) = hand.seen
        envelope = envelope_of(item)
        assert (item.topic, item.message_type, item.route_id, item.deliveries) == (TOPIC, "int", "route", 0)
        assert (envelope.message_id, envelope.key, envelope.attempt) == (message_id, "customer-1", 1)
        await desk.stop()

    run(story())


def test_what_is_there_before_the_consumer_waits_for_it() -> None:
    async def story() -> None:
        desk = await Desk().open()
        await desk.publish(3)
        await turns()
        hand = Hand(acks=True)

        desk.join(hand)
        await until(lambda: desk.safe == 3)

        assert hand.offsets == [0, 1, 2]
        await desk.stop()

    run(story())


def test_what_is_for_others_is_passed() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)

        await desk.publish(5, topic=OTHER)
        await desk.publish()
        await desk.publish(5, topic=OTHER)
        await until(lambda: desk.safe == 11)

        assert hand.offsets == [5]
        await desk.stop()

    run(story())


def test_a_redriven_message_is_for_one_subscription_whatever_the_routes_say() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)

        await desk.publish(2, topic=TOPIC, to="somebody else")
        await desk.publish(1, topic=OTHER, to="orders")
        await desk.publish(1)
        await until(lambda: desk.safe == 4)

        assert hand.offsets == [2, 3]
        assert [item.route_id for item in hand.seen] == ["", "route"]
        await desk.stop()

    run(story())


def test_other_routes_count_for_what_was_not_taken_yet() -> None:
    async def story() -> None:
        desk = await Desk().open(window=1)
        hand = Hand()
        desk.join(hand)
        await desk.publish(1)
        await until(lambda: hand.seen)
        await desk.publish(1, topic=OTHER)
        await desk.publish(1)

        desk.subscription.want(lambda topic, _: "new" if topic == OTHER else None)
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 3)

        assert hand.offsets == [0, 1]
        assert hand.seen[1].route_id == "new"
        await desk.stop()

    run(story())


def test_segments_that_memory_has_no_room_for_are_read_again() -> None:
    async def story() -> None:
        desk = await Desk(cache_bytes=0).open(window=2)
        hand = Hand()
        desk.join(hand)
        for _ in range(10):
            await desk.publish(2)

        while desk.safe < 20:
            await until(lambda: hand.holds)
            hand.say()
            await turns(5)

        assert [envelope_of(item).payload for item in hand.seen] == list(range(20))
        await desk.stop()

    run(story())


def test_no_more_is_taken_than_is_allowed_to_be_open() -> None:
    async def story() -> None:
        desk = await Desk(most_open=6).open(window=1_000)
        hand = Hand()
        desk.join(hand)
        for _ in range(10):
            await desk.publish(2)
        await turns()

        assert hand.offsets == [0, 1, 2, 3, 4, 5]
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 20)
        await desk.stop()

    run(story())


# Windows, and who gets what


@EVERY_MODE
def test_a_window_of_one_is_strict_gating(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, window=1)
        hand = Hand()
        desk.join(hand)
        await desk.publish(4)

        for offset in range(4):
            await until(lambda: hand.holds)
            await turns()
            assert hand.held == [offset]
            assert desk.safe == offset
            hand.say()

        await until(lambda: desk.safe == 4)
        await desk.stop()

    run(story())


def test_a_consumer_has_no_more_than_its_window() -> None:
    async def story() -> None:
        desk = await Desk().open(window=5)
        hand = Hand()
        desk.join(hand)

        await desk.publish(20)
        await turns()
        assert hand.held == [0, 1, 2, 3, 4]
        hand.say(count=2)
        await turns()

        assert hand.held == [2, 3, 4, 5, 6]
        await desk.stop()

    run(story())


def test_shared_is_spread_evenly() -> None:
    async def story() -> None:
        desk = await Desk().open(window=100)
        hands = [Hand(name, acks=True) for name in "abc"]
        desk.join(*hands)

        for _ in range(30):
            await desk.publish(10)
        await until(lambda: desk.safe == 300)

        assert all(80 <= len(hand.seen) <= 120 for hand in hands)
        await desk.stop()

    run(story())


def test_a_consumer_that_is_stuck_starves_nobody() -> None:
    async def story() -> None:
        desk = await Desk().open(window=4)
        stuck, good = Hand("stuck"), Hand("good", acks=True)
        desk.join(stuck, good)

        await desk.publish(100)
        await until(lambda: len(good.seen) == 96)

        assert len(stuck.held) == 4
        assert desk.safe == min(stuck.held)
        await desk.stop()

    run(story())


def test_a_key_that_is_stuck_starves_its_own_key_only() -> None:
    async def story() -> None:
        desk = await Desk().open(KEY_SHARED, window=10)
        hand = Hand()
        desk.join(hand)

        await desk.publish(keys=["slow", "a", "slow", "b", None, "slow", "c"])
        await until(lambda: len(hand.holds) == 5)
        for offset in (1, 3, 4, 6):
            hand.say_of(offset)
        await turns()

        assert hand.held == [0]
        await desk.stop()

    run(story())


def test_exclusive_is_for_one_and_the_next_begins_with_what_was_under_way() -> None:
    async def story() -> None:
        desk = await Desk().open(EXCLUSIVE, window=3)
        first, second = Hand("first"), Hand("second", acks=True)
        desk.join(first, second)
        await desk.publish(10)
        await turns()
        first.say(count=1)
        await turns()
        assert (first.held, second.seen) == ([1, 2, 3], [])

        desk.subscription.leave("first")
        await until(lambda: desk.safe == 10)

        assert second.offsets == list(range(1, 10))
        assert [item.deliveries for item in second.seen] == [1, 1, 1, *[0] * 6]
        await desk.stop()

    run(story())


def test_exclusive_stays_with_the_next_one_when_the_first_recovers() -> None:
    async def story() -> None:
        desk = await Desk().open(EXCLUSIVE)
        first, second = Hand("first", acks=True), Hand("second", acks=True)
        desk.join(first, second)
        first.well = False
        await desk.publish()
        await until(lambda: second.seen)

        first.well = True
        await desk.publish()
        await until(lambda: desk.safe == 2)

        assert (first.offsets, second.offsets) == ([], [0, 1])
        await desk.stop()

    run(story())


def test_one_who_is_ill_gets_nothing_until_it_is_well() -> None:
    async def story() -> None:
        desk = await Desk(watchdog_seconds=0.01).open()
        hand = Hand(acks=True)
        hand.well = False
        desk.join(hand)
        await desk.publish()
        await turns()
        assert hand.seen == []

        hand.well = True  # Nobody says so: the watchdog finds out.
        await until(lambda: hand.seen)

        await desk.stop()

    run(story())


def test_key_order_is_kept_while_consumers_come_and_go() -> None:
    async def story() -> None:
        desk = await Desk().open(KEY_SHARED, window=2)
        hands = {name: Hand(name) for name in "abcd"}
        done: dict[str, list[int]] = {}
        desk.join(hands["a"], hands["b"])
        await desk.publish(keys=[f"k{number % 5}" for number in range(60)])
        there = ["a", "b"]

        for step in range(400):
            if step % 7 == 3:
                joins = next((name for name in "abcd" if name not in there), None)
                if joins and step % 2:
                    there.append(joins)
                    hands[joins] = Hand(joins)
                    desk.join(hands[joins])
                elif len(there) > 1:
                    desk.subscription.leave(there.pop(0))
            for name in there:
                for item, _ in hands[name].holds[:1]:
                    done.setdefault(item.entry.key or "", []).append(item.entry.offset)
                    hands[name].say(count=1)
            await turns(4)
            if desk.safe == 60:
                break

        assert desk.safe == 60
        assert all(offsets == sorted(set(offsets)) for offsets in done.values())
        assert sum(map(len, done.values())) == 60
        await desk.stop()

    run(story())


def test_a_word_from_one_that_has_left_changes_nothing() -> None:
    async def story() -> None:
        desk = await Desk().open()
        gone, there = Hand("gone"), Hand("there")
        desk.join(gone)
        await desk.publish(2)
        await until(lambda: gone.holds)
        desk.subscription.leave("gone")
        desk.join(there)
        await until(lambda: len(there.holds) == 2)

        gone.say(ACKED)

        assert (desk.safe, desk.subscription.acked) == (0, 0)
        there.say()
        await until(lambda: desk.safe == 2)
        assert desk.subscription.acked == 2
        await desk.stop()

    run(story())


def test_a_message_is_acknowledged_once() -> None:
    async def story() -> None:
        desk = await Desk().open(window=1)
        hand = Hand()
        desk.join(hand)
        await desk.publish(3)
        await until(lambda: hand.holds)
        item, tell = hand.holds[0]

        hand.say()
        tell("hand", [item], [ACKED])
        tell("hand", [item], [FAILED])
        await turns()

        assert (hand.held, desk.subscription.acked, desk.subscription.retried) == ([1], 1, 0)
        await desk.stop()

    run(story())


def test_one_who_leaves_twice_or_was_never_there_disturbs_nobody() -> None:
    async def story() -> None:
        desk = await Desk().open()
        desk.join(Hand())

        desk.subscription.leave("hand")
        desk.subscription.leave("hand")
        desk.subscription.leave("nobody")

        assert desk.subscription.consumers == []
        await desk.stop()

    run(story())


def test_one_who_joins_again_gets_what_it_had() -> None:
    async def story() -> None:
        desk = await Desk().open()
        before, after = Hand("same"), Hand("same", acks=True)
        desk.join(before)
        await desk.publish(2)
        await until(lambda: before.holds)

        desk.join(after)
        await turns()

        assert after.offsets == [0, 1]
        await desk.stop()

    run(story())


def test_one_who_leaves_while_its_messages_are_read_stops_nobody() -> None:
    async def story() -> None:
        desk = await Desk().open(window=1)
        desk.journal.turns = 10
        leaver, there = Hand("leaver"), Hand("there", acks=True)
        desk.join(leaver)
        publishing = asyncio.ensure_future(desk.publish(3))
        # It has its share as soon as the cursor is being kept that says so.
        await until(lambda: desk.log.head)
        await turns(4)
        assert desk.subscription.window.open
        assert leaver.seen == []

        desk.subscription.leave("leaver")
        desk.join(there)
        await publishing
        await turns(80)

        assert there.offsets == [0, 1, 2]
        await desk.stop()

    run(story())


# Retries


def test_a_message_that_failed_comes_again_with_the_number_of_its_try() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish()

        for _ in range(2):
            await until(lambda: hand.holds)
            hand.say(FAILED)
        await until(lambda: hand.holds)
        hand.say()

        assert [envelope_of(item).attempt for item in hand.seen] == [1, 2, 3]
        assert (desk.safe, desk.subscription.retried, desk.letters) == (1, 2, [])
        await desk.stop()

    run(story())


@EVERY_MODE
def test_waiting_for_the_next_try_holds_no_room(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, window=1)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["a", "b", "a"])
        await until(lambda: hand.holds)

        hand.say(failed_for(10))
        await turns()
        meanwhile = list(hand.held)
        hand.acks = True
        hand.say()
        await turns()
        before = hand.offsets[1:]
        await desk.advance(10)
        await until(lambda: desk.safe == 3)

        # Nothing overtakes it in exclusive mode, and nothing of its key in key-shared mode.
        assert meanwhile == {SHARED: [1], EXCLUSIVE: [], KEY_SHARED: [1]}[mode]
        assert before == {SHARED: [1, 2], EXCLUSIVE: [], KEY_SHARED: [1]}[mode]
        assert sorted(hand.offsets) == [0, 0, 1, 2]
        await desk.stop()

    run(story())


def test_a_retry_waits_as_long_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subscription_module, "retry_delay", lambda settings, tries: settings.first_delay_seconds * tries
    )

    async def story() -> None:
        desk = await Desk().open(retry=RetrySettings(tries=3, first_delay_seconds=4))
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)

        hand.say(FAILED)
        await desk.advance(3.9)
        assert hand.held == []
        await desk.advance(0.1)
        assert hand.held == [0]
        hand.say(FAILED)
        await desk.advance(7.9)
        assert hand.held == []
        await desk.advance(0.1)

        assert hand.held == [0]
        await desk.stop()

    run(story())


def test_after_the_last_try_it_is_buried() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=RetrySettings(tries=2, first_delay_seconds=0))
        hand = Hand()
        desk.join(hand)
        await desk.publish()

        for _ in range(2):
            await until(lambda: hand.holds)
            hand.say(FAILED)
        await until(lambda: desk.letters)
        await turns()

        (letter,) = desk.letters
        assert (letter.tries, letter.outcome, letter.item.entry.offset) == (2, BROKEN, 0)
        assert (desk.safe, desk.subscription.given_up, desk.subscription.acked) == (1, 1, 0)
        await desk.stop()

    run(story())


def test_without_a_rule_for_retries_there_is_one_try() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=None)
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)

        hand.say(FAILED)
        await until(lambda: desk.letters)

        assert [letter.tries for letter in desk.letters] == [1]
        await desk.stop()

    run(story())


@EVERY_MODE
def test_the_cursor_passes_a_message_only_when_its_letter_is_safe(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, retry=None)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["k"])
        await until(lambda: hand.holds)

        desk.journal.away = True
        hand.say(FAILED)
        await desk.clock.advance(60)
        await turns()
        during = (desk.safe, list(desk.letters))
        desk.journal.away = False
        await desk.clock.advance(RETRY_SECONDS)
        await until(lambda: desk.letters)
        await turns()

        assert during == (0, [])
        assert desk.safe == 1
        await desk.stop()

    run(story())


@EVERY_MODE
def test_what_comes_behind_a_letter_that_is_not_safe_keeps_its_order(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, window=1, retry=None)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["k", "k"])
        await until(lambda: hand.holds)

        desk.journal.away = True
        hand.say(FAILED)
        await desk.clock.advance(5)
        await turns()
        during = list(hand.held)
        desk.journal.away = False
        await desk.clock.advance(RETRY_SECONDS)
        await until(lambda: hand.held == [1])

        assert during == ([1] if mode is SHARED else [])
        await desk.stop()

    run(story())


def test_a_letter_that_was_not_safe_at_the_end_is_tried_again_in_the_next_life() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=None)
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)
        desk.journal.away = True
        hand.say(FAILED)
        await turns()

        await desk.stop()
        desk.journal.away = False
        again = await Desk(desk.journal).open(retry=None, cursor=kept_cursor(desk.journal))
        hand = Hand()
        again.join(hand)
        await until(lambda: hand.holds)

        assert (hand.held, hand.seen[0].deliveries >= 1) == ([0], True)
        await again.stop()

    run(story())


def test_what_is_to_be_dropped_is_logged_and_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        desk = await Desk().open(poison=PoisonPolicy.DROP)
        hand = Hand()
        desk.join(hand)
        await desk.publish(2)
        await until(lambda: hand.holds)
        for _ in range(3):
            await until(lambda: 0 in hand.held)
            hand.say_of(0, FAILED)
        await turns()
        hand.say()

        assert (desk.safe, desk.letters, desk.subscription.given_up) == (2, [], 1)
        await desk.stop()

    with caplog.at_level(logging.ERROR, "raydispatch"):
        run(story())
    assert [record.message for record in caplog.records] == ["message given up"]
    assert caplog.records[0].__dict__["subscription"] == "orders"


@pytest.mark.parametrize(("mode", "others"), [(SHARED, [1, 2]), (EXCLUSIVE, []), (KEY_SHARED, [2])])
def test_what_blocks_is_tried_for_ever_and_nothing_overtakes_it(mode: DeliveryMode, others: list[int]) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, window=1, poison=PoisonPolicy.BLOCK)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["k", "k", "l"])

        for _ in range(20):
            await until(lambda: hand.holds)
            for offset in list(hand.held):
                hand.say_of(offset, failed_for(1) if offset == 0 else ACKED)
            await turns()
            await desk.advance(1)

        assert sorted(set(hand.offsets) - {0}) == others
        assert hand.offsets.count(0) >= 10
        assert (desk.letters, desk.safe) == ([], 0)
        await until(lambda: hand.holds)
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 3)
        await desk.stop()

    run(story())


def test_what_blocks_is_tried_for_ever_even_after_a_thousand_tries() -> None:
    async def story() -> None:
        desk = Desk()
        await desk.log.open()
        await desk.publish()
        retry = RetrySettings(max_delay_seconds=1)
        await desk.open(retry=retry, poison=PoisonPolicy.BLOCK, cursor=Cursor(1, ((0, 1_100, 0),), 1))
        hand = Hand()
        desk.join(hand)
        await until(lambda: hand.holds)

        hand.say(FAILED)
        await desk.advance(1)
        await until(lambda: hand.holds, 1)

        await desk.stop()

    run(story())


def test_a_payload_that_does_not_fit_is_buried_at_once() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)

        hand.say(verdict_of(INVALID))
        await until(lambda: desk.letters)
        await turns()

        assert (len(hand.seen), desk.letters[0].outcome, desk.safe) == (1, INVALID, 1)
        await desk.stop()

    run(story())


@pytest.mark.parametrize(
    ("status", "code", "ending", "is_final"),
    [
        (DispatchStatus.SUCCESS, None, Ending.ACKED, False),
        (DispatchStatus.SKIPPED, ErrorCode.FILTERED, Ending.ACKED, False),
        (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION, Ending.FAILED, False),
        (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_RESULT, Ending.FAILED, True),
        (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, Ending.FAILED, False),
        (DispatchStatus.PUBLISH_FAILED, ErrorCode.OUTBOX_FULL, Ending.FAILED, False),
        (DispatchStatus.PUBLISH_FAILED, ErrorCode.HOP_LIMIT, Ending.FAILED, True),
        (DispatchStatus.INVALID_MESSAGE, ErrorCode.PAYLOAD_INVALID, Ending.FAILED, True),
        (DispatchStatus.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN, Ending.REFUSED, False),
        (DispatchStatus.REJECTED, ErrorCode.QUEUE_FULL, Ending.REFUSED, False),
    ],
)
def test_an_outcome_has_a_meaning_for_the_message(
    status: DispatchStatus, code: ErrorCode | None, ending: Ending, is_final: bool
) -> None:
    verdict = verdict_of(Outcome("orders", status, error_code=code))

    assert (verdict.ending, verdict.is_final) == (ending, is_final)


@EVERY_MODE
def test_what_was_refused_comes_again_and_that_costs_no_try(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, window=2)
        hand = Hand()
        desk.join(hand)
        await desk.publish(3)

        for _ in range(10):
            await until(lambda: len(hand.holds) == 2)
            assert hand.held == [0, 1]
            hand.say_at_once(REFUSED, REFUSED)
            await turns()
            assert hand.held == []
            await desk.advance(REFUSED_SECONDS)

        assert {item.deliveries for item in hand.seen} == {0}
        assert (desk.letters, desk.subscription.retried) == ([], 0)
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 3)
        await desk.stop()

    run(story())


def test_one_that_has_no_room_holds_up_nobody_else() -> None:
    async def story() -> None:
        desk = await Desk().open(window=2)
        full, good = Hand("full"), Hand("good", acks=True)
        desk.join(full)
        await desk.publish(2)
        await until(lambda: len(full.holds) == 2)
        desk.join(good)

        full.say_at_once(REFUSED, REFUSED)
        await desk.publish(10)
        await until(lambda: desk.safe == 12)

        assert sorted(good.offsets) == list(range(12))
        assert desk.clock.now() == 0
        await desk.stop()

    run(story())


def test_exclusive_stays_with_one_that_has_no_room_for_a_moment() -> None:
    async def story() -> None:
        desk = await Desk().open(EXCLUSIVE, window=2)
        full, idle = Hand("full"), Hand("idle")
        desk.join(full, idle)
        await desk.publish(2)
        await until(lambda: len(full.holds) == 2)

        full.say_at_once(REFUSED, REFUSED)
        await turns()
        await desk.advance(REFUSED_SECONDS)

        assert (full.held, idle.held) == ([0, 1], [])
        await desk.stop()

    run(story())


@EVERY_MODE
def test_a_lost_batch_is_delivered_again_one_by_one(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode)
        hand = Hand()
        desk.join(hand)
        await desk.publish(3)
        await until(lambda: len(hand.holds) == 3)

        hand.say_at_once(LOST, LOST, LOST)
        for offset in range(3):
            await until(lambda: hand.holds)
            await turns()
            assert hand.held == [offset]
            hand.say()
        await until(lambda: desk.safe == 3)

        assert [item.deliveries for item in hand.seen] == [0, 0, 0, 1, 1, 1]
        assert desk.letters == []
        await desk.stop()

    run(story())


def test_one_that_kills_its_consumer_ends_as_a_letter_alone() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish(4)
        await until(lambda: len(hand.holds) == 4)
        hand.say_at_once(*[LOST] * 4)

        for _ in range(20):
            if desk.safe == 4:
                break
            await until(lambda: hand.holds)
            for offset in list(hand.held):
                hand.say_of(offset, LOST if offset == 2 else ACKED)
            await turns()

        (letter,) = desk.letters
        assert (letter.item.entry.offset, letter.tries, desk.subscription.acked) == (2, 3, 3)
        assert letter.outcome.error_code is ErrorCode.REPLICA_LOST
        assert letter.outcome.status is DispatchStatus.DISPATCHER_ERROR
        await desk.stop()

    run(story())


def test_a_loss_alone_counts_as_a_try() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=RetrySettings(tries=2, first_delay_seconds=0))
        hand = Hand()
        desk.join(hand)
        await desk.publish()

        for _ in range(2):
            await until(lambda: hand.holds)
            hand.say(LOST)
        await until(lambda: desk.letters)

        assert desk.letters[0].tries == 2
        await desk.stop()

    run(story())


def test_some_of_a_batch_may_be_done_when_the_rest_is_lost() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish(4)
        await until(lambda: len(hand.holds) == 4)

        hand.acks = True
        hand.say_at_once(ACKED, LOST, FAILED, LOST)
        await until(lambda: desk.safe == 4)

        assert Counter(hand.offsets) == {0: 1, 1: 2, 2: 2, 3: 2}
        assert desk.subscription.acked == 4
        await desk.stop()

    run(story())


# At most once


@EVERY_MODE
@pytest.mark.parametrize("verdict", [ACKED, FAILED, LOST], ids=lambda verdict: verdict.ending.value)
def test_at_most_once_means_one_delivery_whatever_becomes_of_it(mode: DeliveryMode, verdict: Verdict) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, reliable=False, window=2)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["k"] * 6)

        for _ in range(6):
            await until(lambda: hand.holds)
            hand.say(verdict, count=1)
        await desk.advance(60)

        assert hand.offsets == list(range(6))
        assert desk.cursors == []
        await desk.stop()

    run(story())


def test_at_most_once_what_failed_is_buried_and_not_tried_again() -> None:
    async def story() -> None:
        desk = await Desk().open(reliable=False)
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)

        hand.say(FAILED)
        await until(lambda: desk.letters)
        await desk.advance(60)

        assert (len(hand.seen), desk.letters[0].tries, desk.subscription.given_up) == (1, 1, 1)
        await desk.stop()

    run(story())


@EVERY_MODE
def test_at_most_once_what_one_had_that_leaves_goes_to_nobody(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk().open(mode, reliable=False, window=2)
        first, second = Hand("first"), Hand("second", acks=True)
        desk.join(first)
        await desk.publish(keys=["k", "k", "l", "k"])
        await until(lambda: first.holds)
        had = list(first.held)

        desk.subscription.leave("first")
        desk.join(second)
        await until(lambda: len(second.seen) == 4 - len(had))

        assert set(had).isdisjoint(second.offsets)
        await desk.stop()

    run(story())


def test_at_most_once_what_the_journal_has_let_go_of_holds_up_nobody() -> None:
    async def story() -> None:
        desk = await Desk(cache_bytes=0, watchdog_seconds=0.01).open(reliable=False, window=1)
        hand = Hand()
        desk.join(hand)
        await desk.publish(3)
        await until(lambda: hand.holds)
        await desk.publish(1)
        await desk.journal.trim(3)

        hand.acks = True
        hand.say()
        await until(lambda: 3 in hand.offsets, 1)

        await desk.stop()

    run(story())


@pytest.mark.parametrize(
    "mode",
    [SHARED, EXCLUSIVE, KEY_SHARED],
)
def test_what_the_journal_has_let_go_of_and_nobody_can_get_stops_nothing(mode: DeliveryMode) -> None:
    async def story() -> None:
        desk = await Desk(cache_bytes=0, watchdog_seconds=0.01).open(mode, window=2)
        stuck, leaver, there = Hand("stuck"), Hand("leaver"), Hand("there", acks=True)
        desk.join(stuck)
        await desk.publish(keys=["k", "k"])
        await until(lambda: stuck.holds)
        await desk.publish(keys=["k", "l"])
        # Of the first segment, something waits whose bytes are gone; who gets it leaves while it is looked for.
        await desk.journal.trim(2)
        desk.journal.turns = 10
        desk.join(leaver)
        stuck.well = False
        for offset in list(stuck.held):
            stuck.say_of(offset, REFUSED)
        await turns(4)
        desk.subscription.leave("leaver")
        desk.subscription.leave("stuck")
        desk.join(there)
        await until(lambda: desk.safe == 4, 1)

        assert not desk.run.done()
        assert {2, 3} <= set(there.offsets)
        await desk.stop()

    run(story())


# Time


def test_a_message_is_not_delivered_before_it_is_due() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)

        await desk.publish(due=10)
        await desk.publish()
        await until(lambda: hand.seen)
        await desk.advance(9.9)
        before = list(hand.offsets)
        await desk.advance(0.2)

        assert before == [1]
        assert hand.offsets == [1, 0]
        assert [item.deliveries for item in hand.seen] == [0, 0]
        await desk.stop()

    run(story())


def test_a_message_whose_time_has_passed_comes_at_once() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)

        await desk.publish(due=-5)
        await until(lambda: hand.seen)

        await desk.stop()

    run(story())


def test_a_scheduled_message_survives_a_crash_and_still_waits() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)
        await desk.publish(due=10)
        await turns()
        await desk.subscription.keep_cursor()
        await desk.stop()

        again = await Desk(desk.journal, desk.clock).open(cursor=kept_cursor(desk.journal))
        again.join(hand)
        await again.advance(9)
        before = list(hand.seen)
        await again.advance(2)

        assert before == []
        assert hand.offsets == [0]
        await again.stop()

    run(story())


def test_a_scheduled_message_that_nobody_had_is_a_first_delivery_after_a_restart_in_order() -> None:
    async def story() -> None:
        desk = await Desk().open()
        desk.join(Hand())
        await desk.publish(due=10)
        await turns()
        desk.subscription.end()
        await desk.subscription.keep_cursor()
        await desk.stop()

        again = await Desk(desk.journal, desk.clock).open(cursor=kept_cursor(desk.journal))
        hand = Hand(acks=True)
        again.join(hand)
        await again.advance(11)

        assert [item.deliveries for item in hand.seen] == [0]
        await again.stop()

    run(story())


def test_no_more_a_second_than_is_allowed_to_all_together() -> None:
    async def story() -> None:
        desk = await Desk().open(per_second=10)
        hands = [Hand(name, acks=True) for name in "ab"]
        desk.join(*hands)
        await desk.publish(100)
        counts = []

        for _ in range(5):
            for _ in range(10):
                await desk.advance(0.1)
            counts.append(sum(len(hand.seen) for hand in hands))

        assert all(10 * second <= count <= 10 * second + 2 for second, count in enumerate(counts, 1))
        await desk.stop()

    run(story())


def test_what_was_not_delivered_for_want_of_room_is_not_caught_up_with_at_once() -> None:
    async def story() -> None:
        desk = await Desk().open(window=20, per_second=10)
        hand = Hand()
        desk.join(hand)
        await desk.publish(200)
        for _ in range(100):
            await desk.advance(0.1)
        assert len(hand.holds) == 20

        hand.say()
        await turns()

        assert len(hand.holds) <= 2
        await desk.stop()

    run(story())


def test_the_lag_is_what_lies_beyond_the_safe_cursor() -> None:
    async def story() -> None:
        desk = await Desk().open(window=2)
        hand = Hand()
        desk.join(hand)
        assert desk.subscription.status().lag == 0

        await desk.publish(10)
        await until(lambda: len(hand.holds) == 2)
        full = desk.subscription.status()
        hand.say_of(1)
        await turns()
        partly = desk.subscription.status()
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 10)
        done = desk.subscription.status()

        assert (full.lag, full.in_flight, full.waiting, full.position) == (10, 2, 8, 10)
        assert (partly.lag, partly.acked, partly.in_flight) == (10, 1, 2)
        assert (done.lag, done.acked, done.in_flight, done.waiting) == (0, 10, 0, 0)
        assert (done.name, done.mode, done.reliable, done.consumers) == ("orders", SHARED, True, 1)
        await desk.stop()

    run(story())


# Cursors


def test_nothing_is_delivered_before_the_cursor_says_that_it_may_have_been() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        desk.journal.away = True
        desk.journal.turns = 0
        publishing = asyncio.ensure_future(desk.publish())
        await turns()
        desk.journal.away = False
        await desk.clock.advance(RETRY_SECONDS)
        await publishing
        await until(lambda: hand.holds)

        assert desk.cursors[-1].may_have_run > 0
        assert kept_cursor(desk.journal) == desk.cursors[-1]._replace(open=tuple(desk.cursors[-1].open))
        await desk.stop()

    run(story())


def test_a_cursor_is_not_kept_for_every_message() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)

        for _ in range(50):
            await desk.publish(10)
        await until(lambda: desk.safe == 500)

        assert len(desk.cursors) == 1
        await desk.stop()

    run(story())


def test_messages_beyond_what_the_cursor_covers_wait_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "AHEAD", 2)

    async def story() -> None:
        desk = await Desk().open(window=1)
        hand = Hand(acks=True)
        desk.join(hand)

        for _ in range(20):
            await desk.publish()
        await until(lambda: desk.safe == 20)

        assert 5 <= len(desk.cursors) <= 20
        promises = [cursor.may_have_run for cursor in desk.cursors]
        assert promises == sorted(set(promises))
        await desk.stop()

    run(story())


def test_every_message_of_a_share_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "AHEAD", 1)

    async def story() -> None:
        desk = await Desk().open(KEY_SHARED)
        hand = Hand()
        desk.join(hand)
        await desk.publish(keys=["k"])
        await until(lambda: hand.holds)
        hand.say()
        reserved = kept_cursor(desk.journal).may_have_run

        await desk.publish(keys=[None, "a", "b", "c", "d"])
        await until(lambda: len(hand.holds) == 5)

        assert reserved < max(hand.held)
        assert max(hand.held) < kept_cursor(desk.journal).may_have_run
        await desk.stop()

    run(story())


def test_an_older_cursor_never_replaces_a_newer_one() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)
        await desk.publish(3)
        await until(lambda: desk.safe == 3)
        desk.journal.away = True
        older = asyncio.ensure_future(desk.subscription.keep_cursor())
        await turns()
        desk.journal.away = False

        await desk.publish(3)
        await until(lambda: desk.safe == 6)
        newer = asyncio.ensure_future(desk.subscription.keep_cursor())
        await desk.clock.advance(1)
        await asyncio.gather(older, newer)

        assert kept_cursor(desk.journal).position == 6
        await desk.stop()

    run(story())


def test_a_cursor_that_is_being_kept_without_consumers_is_no_license_for_one_that_joins() -> None:
    async def story() -> None:
        desk = await Desk().open()
        first, second = Hand("first", acks=True), Hand("second")
        desk.join(first)
        await desk.publish()
        await until(lambda: desk.safe == 1)
        desk.subscription.leave("first")
        await desk.publish()
        desk.journal.turns = 20
        keeping = asyncio.ensure_future(desk.subscription.keep_cursor())
        await turns(2)

        # The cursor on its way says that nothing is with anybody, and the one before covers what comes.
        desk.join(second)
        await until(lambda: second.holds)
        await keeping
        await desk.stop()
        desk.journal.turns = 0
        again = await Desk(desk.journal).open(cursor=kept_cursor(desk.journal))
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 2)

        assert second.offsets == [1]
        assert [(item.entry.offset, item.deliveries) for item in hand.seen] == [(1, 1)]
        await again.stop()

    run(story())


def test_after_a_crash_it_goes_on_with_what_was_open() -> None:
    async def story() -> None:
        desk = await Desk().open(window=4)
        hand = Hand()
        desk.join(hand)
        await desk.publish(6)
        await until(lambda: len(hand.holds) == 4)
        hand.say_of(1)
        hand.say_of(3)
        await turns()
        await desk.subscription.keep_cursor()
        await desk.stop()

        again = await Desk(desk.journal).open(cursor=kept_cursor(desk.journal))
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 6)

        assert hand.offsets == [0, 2, 4, 5]
        assert all(item.deliveries >= 1 for item in hand.seen[:4])
        await again.stop()

    run(story())


def test_after_a_crash_only_what_was_done_since_the_cursor_comes_again() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand(acks=True)
        desk.join(hand)
        await desk.publish(3)
        await until(lambda: desk.safe == 3)
        await desk.subscription.keep_cursor()
        await desk.publish(3)
        await until(lambda: desk.safe == 6)
        await desk.stop()

        again = await Desk(desk.journal).open(cursor=kept_cursor(desk.journal))
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 6)

        assert hand.offsets == [3, 4, 5]
        assert all(envelope_of(item).attempt >= 2 for item in hand.seen)
        await again.stop()

    run(story())


def test_tries_survive_a_crash() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=RetrySettings(tries=3, first_delay_seconds=0))
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        for _ in range(2):
            await until(lambda: hand.holds)
            hand.say(FAILED)
        await desk.subscription.keep_cursor()
        await desk.stop()

        again = await Desk(desk.journal).open(cursor=kept_cursor(desk.journal))
        again.join(hand)
        await until(lambda: hand.holds)
        hand.say(FAILED)
        await until(lambda: again.letters)

        assert again.letters[0].tries == 3
        await again.stop()

    run(story())


def test_what_the_journal_no_longer_has_is_let_go_of_after_a_crash() -> None:
    async def story() -> None:
        desk = await Desk().open()
        await desk.publish(3)
        await desk.publish(2)
        await desk.stop()
        await desk.journal.trim(3)

        again = await Desk(desk.journal).open(cursor=Cursor(3, ((0, 0, 0), (2, 0, 0)), 3))
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 5)

        assert hand.offsets == [3, 4]
        await again.stop()

    run(story())


def test_a_journal_that_is_away_at_the_start_is_waited_for() -> None:
    async def story() -> None:
        desk = await Desk().open()
        await desk.publish(3)
        await desk.stop()

        again = Desk(desk.journal, watchdog_seconds=0.01, recent_ids=2)
        again.log.head = 3
        await again.open(cursor=Cursor(3, ((0, 0, 0), (2, 0, 0)), 3))
        again.log._cache = Log(desk.journal, again.settings, again.clock)._cache
        desk.journal.away = True
        await turns()
        desk.journal.away = False
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 3, 1)

        assert hand.offsets == [0, 2]
        await again.stop()

    run(story())


def test_what_was_open_in_one_segment_is_read_once() -> None:
    async def story() -> None:
        desk = await Desk().open()
        await desk.publish(500)
        await desk.stop()
        reads = desk.journal.reads

        again = await Desk(desk.journal).open(cursor=Cursor(500, tuple((one, 0, 0) for one in range(500)), 500))
        hand = Hand(acks=True)
        again.join(hand)
        await until(lambda: again.safe == 500)

        assert desk.journal.reads - reads <= 5
        await again.stop()

    run(story())


def test_a_journal_that_is_away_meanwhile_stops_nothing_for_good() -> None:
    async def story() -> None:
        desk = await Desk(cache_bytes=0, watchdog_seconds=0.01).open(window=2)
        hand = Hand()
        desk.join(hand)
        for _ in range(5):
            await desk.publish(2)
        await until(lambda: len(hand.holds) == 2)

        desk.journal.away = True
        hand.say()
        await turns()
        desk.journal.away = False
        hand.acks = True
        hand.say()
        await until(lambda: desk.safe == 10)

        assert Counter(hand.offsets) == dict.fromkeys(range(10), 1)
        await desk.stop()

    run(story())


# Ending


def test_draining_delivers_nothing_more_and_waits_for_what_is_out() -> None:
    async def story() -> None:
        desk = await Desk().open(window=2)
        hand = Hand()
        desk.join(hand)
        await desk.publish(5)
        await until(lambda: len(hand.holds) == 2)

        draining = asyncio.ensure_future(desk.subscription.drain(5))
        await turns()
        assert not draining.done()
        hand.say()

        assert await draining
        assert (hand.offsets, desk.safe) == ([0, 1], 2)
        await desk.stop()

    run(story())


def test_draining_ends_when_the_time_is_up() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)

        assert not await desk.subscription.drain(0)
        assert desk.safe == 0
        await desk.stop()

    run(story())


def test_draining_waits_for_letters_too() -> None:
    async def story() -> None:
        desk = await Desk().open(retry=None)
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)
        desk.journal.away = True
        hand.say(FAILED)

        draining = asyncio.ensure_future(desk.subscription.drain(5))
        await turns()
        assert not draining.done()
        desk.journal.away = False
        await desk.clock.advance(RETRY_SECONDS)

        assert await draining
        assert len(desk.letters) == 1
        await desk.stop()

    run(story())


def test_draining_ends_when_the_last_consumer_leaves() -> None:
    async def story() -> None:
        desk = await Desk().open()
        hand = Hand()
        desk.join(hand)
        await desk.publish()
        await until(lambda: hand.holds)
        draining = asyncio.ensure_future(desk.subscription.drain(5))
        await turns()

        desk.subscription.leave("hand")
        await turns()

        assert draining.done()
        await desk.stop()

    run(story())


def test_with_nothing_out_draining_is_done_at_once() -> None:
    async def story() -> None:
        desk = await Desk().open()

        assert await desk.subscription.drain(0)
        await desk.stop()

    run(story())


# Against a model


class Puppet(Hand):
    """A consumer that reports every delivery."""

    def __init__(self, consumer_id: str, on_take: Callable[["Puppet", Item], None]) -> None:
        super().__init__(consumer_id)
        self._on_take = on_take

    def take(self, items: list[Item], tell: Tell) -> None:
        for item in items:
            self._on_take(self, item)
        super().take(items, tell)


class SubscriptionAgainstModel(RuleBasedStateMachine):
    """Consumers do what they like, and processes die: nothing is lost, and all that is promised of order holds."""

    reliable = True

    @initialize(
        mode=st.sampled_from(DeliveryMode),
        window=st.sampled_from([1, 2, 6]),
        cache=st.sampled_from([0, 10**6]),
        latency=st.sampled_from([0, 2]),
    )
    def begin(self, mode: DeliveryMode, window: int, cache: int, latency: int) -> None:
        self.ahead, subscription_module.AHEAD = subscription_module.AHEAD, 4
        self.runner = asyncio.Runner()
        self.mode, self.window, self.cache = mode, window, cache
        self.journal, self.clock = MemoryJournal(), FakeClock()
        self.journal.turns = latency
        self.names = 0
        self.wanted: dict[int, str | None] = {}
        """The key of every message that is for this subscription."""
        self.ran: set[int] = set()
        """What may have run, in any life."""
        self.had_run: dict[int, bool] = {}
        """Whether it may have run before its last delivery."""
        self.acked: set[int] = set()
        self.deliveries: Counter[int] = Counter()
        self.refusals: Counter[int] = Counter()
        self.runner.run(self.live(Cursor()))

    async def live(self, cursor: Cursor) -> None:
        self.desk = Desk(self.journal, self.clock, cache_bytes=self.cache, most_open=12)
        self.first = cursor
        self.puppets: list[Puppet] = []
        self.keepers: list[asyncio.Future[None]] = []
        self.last_of_key: dict[str, int] = {}
        self.done_here: set[int] = set()
        await self.desk.open(
            self.mode, window=self.window, reliable=self.reliable, cursor=cursor,
            retry=RetrySettings(tries=2, first_delay_seconds=1, max_delay_seconds=1),
        )  # fmt: skip

    async def kill(self) -> None:
        for keeper in self.keepers:
            keeper.cancel()
        await self.desk.stop()

    def others_run(self, before: Callable[[], object] = lambda: None) -> None:
        async def others() -> None:
            before()
            self.desk.subscription.poke()
            await turns(25)

        self.runner.run(others())

    @property
    def buried(self) -> set[int]:
        return {int(key.rpartition("/")[2]) for key in self.journal.buckets.get("letters", {})}

    @property
    def done(self) -> set[int]:
        return self.acked | self.buried

    # What is checked at each delivery

    def delivered(self, puppet: Puppet, item: Item) -> None:
        offset, key = item.entry.offset, item.entry.key
        self.deliveries[offset] += 1
        assert offset in self.wanted, "only what is wanted"
        assert envelope_of(item).payload == offset, "and the right one"
        assert all(offset not in other.held for other in self.puppets), "never at two places at once"
        assert len(puppet.held) < self.window, "never more than the window"
        if not self.reliable:
            assert self.deliveries[offset] == 1 + self.refusals[offset], "never twice, but what nobody has begun with"
            self.check_order(puppet, offset, key)
            return
        assert offset not in self.done_here, "never again what was settled in this life"
        if offset in self.done:
            kept_open = {one for one, _, _ in self.first.open}
            assert offset >= self.first.position or offset in kept_open, (
                "again only what the last cursor had not settled"
            )
        if offset in self.ran:
            assert item.deliveries >= 1, "who gets it again is told so"
        if item.entry.is_suspect:
            assert puppet.held == [], "a suspect is alone"
        self.check_order(puppet, offset, key)
        self.had_run[offset] = offset in self.ran
        self.ran.add(offset)

    def check_order(self, puppet: Puppet, offset: int, key: str | None) -> None:
        if self.mode is EXCLUSIVE:
            assert all(not other.held for other in self.puppets if other is not puppet), "one consumer at a time"
        if self.mode is KEY_SHARED and key is not None:
            held = [one for other in self.puppets for one in other.held]
            assert all(self.wanted[one] != key for one in held), "one of a key at a time"
            assert self.last_of_key.get(key, -1) <= offset, "in the order of the key"
            self.last_of_key[key] = offset
            if self.reliable:
                before = {one for one, other in self.wanted.items() if other == key and one < offset}
                assert before <= self.done, "and none is left out"

    # What may happen

    @rule(keys=st.lists(st.none() | st.sampled_from("ab"), min_size=1, max_size=4), strangers=st.integers(0, 2))
    def publish(self, keys: list[str | None], strangers: int) -> None:
        if self.journal.away:
            return

        async def publish() -> None:
            if strangers:
                await self.desk.publish(strangers, topic=OTHER)
            for row, key in enumerate(keys):
                self.wanted[self.desk.log.head + row] = key
            await self.desk.publish(keys=keys)

        self.runner.run(publish())
        self.others_run()

    @rule(count=st.integers(1, 2))
    def redrive(self, count: int) -> None:
        if self.journal.away:
            return
        for row in range(count):
            self.wanted[self.desk.log.head + row] = None
        self.runner.run(self.desk.publish(count, topic=OTHER, to="orders"))
        self.others_run()

    @rule()
    def join(self) -> None:
        self.names += 1
        puppet = Puppet(f"puppet-{self.names}", self.delivered)
        self.puppets.append(puppet)
        self.desk.join(puppet)
        self.others_run()

    @precondition(lambda self: bool(getattr(self, "puppets", None)))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        puppet = data.draw(st.sampled_from(self.puppets))
        self.puppets.remove(puppet)
        self.desk.subscription.leave(puppet.consumer_id)
        self.others_run(puppet.say)  # Too late.

    @precondition(lambda self: bool(getattr(self, "puppets", None)))
    @rule(data=st.data())
    def fall_ill_or_recover(self, data: st.DataObject) -> None:
        puppet = data.draw(st.sampled_from(self.puppets))
        puppet.well = not puppet.well
        self.others_run()

    @precondition(lambda self: any(puppet.holds for puppet in getattr(self, "puppets", ())))
    @rule(
        data=st.data(),
        verdicts=st.lists(st.sampled_from([ACKED, ACKED, FAILED, REFUSED, LOST]), min_size=1, max_size=4),
    )
    def say(self, data: st.DataObject, verdicts: list[Verdict]) -> None:
        puppet = data.draw(st.sampled_from([one for one in self.puppets if one.holds]))
        verdicts = verdicts[: len(puppet.holds)]
        if verdicts[0] is LOST:
            # Who loses one loses all.
            verdicts = [LOST] * len(puppet.holds)
        for offset, verdict in zip(puppet.held, verdicts, strict=False):
            if verdict is ACKED:
                self.acked.add(offset)
                self.done_here.add(offset)
            if verdict is REFUSED:
                self.refusals[offset] += 1
            if verdict is REFUSED and not self.had_run.get(offset):
                self.ran.discard(offset)
        self.others_run(lambda: puppet.say_at_once(*verdicts))

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def advance(self, seconds: float) -> None:
        self.runner.run(self.clock.advance(seconds))
        self.others_run()

    @rule()
    def the_journal_goes_away_or_comes_back(self) -> None:
        self.journal.away = not self.journal.away
        if not self.journal.away:
            self.runner.run(self.clock.advance(RETRY_SECONDS))
        self.others_run()

    @precondition(lambda self: self.reliable)
    @rule(patience=st.integers(0, 6))
    def keep_cursor(self, patience: int) -> None:
        """As the upkeep does, while everything else goes on."""

        async def keep() -> None:
            self.keepers.append(asyncio.ensure_future(self.desk.subscription.keep_cursor()))
            await turns(patience)

        self.runner.run(keep())

    @precondition(lambda self: not self.journal.away)
    @rule()
    def crash(self) -> None:
        self.runner.run(self.kill())
        head = len(self.wanted) and max(self.wanted) + 1
        cursor = kept_cursor(self.journal) if self.reliable else Cursor(self.runner.run(self.journal.head()))
        assert cursor.position <= head or not self.reliable or cursor.position <= self.desk.log.head
        self.runner.run(self.live(cursor))
        self.others_run()

    # What always holds

    @invariant()
    def the_safe_cursor_never_passes_what_is_not_done(self) -> None:
        if not hasattr(self, "desk") or not self.reliable:
            return
        safe = self.desk.safe
        assert all(offset in self.done for offset in self.wanted if offset < safe)
        kept = kept_cursor(self.journal)
        kept_open = {offset for offset, _, _ in kept.open}
        assert all(one in self.done or one in kept_open for one in self.wanted if one < kept.position)

    @invariant()
    def the_subscription_runs(self) -> None:
        if hasattr(self, "desk"):
            assert not self.desk.run.done()

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        try:
            self.end_well()
        finally:
            subscription_module.AHEAD = self.ahead
            self.runner.run(self.kill())
            self.runner.close()

    def end_well(self) -> None:
        """With a journal and a consumer that do their work, everything ends."""
        self.journal.away = False
        self.advance(1.0)
        for puppet in list(self.puppets):
            self.puppets.remove(puppet)
            self.desk.subscription.leave(puppet.consumer_id)
        self.join()
        (puppet,) = self.puppets
        for _ in range(6 * len(self.wanted) + 10):
            if puppet.holds:
                self.acked |= set(puppet.held)
                self.done_here |= set(puppet.held)
                self.others_run(lambda: puppet.say_at_once(*[ACKED] * len(puppet.holds)))
            if self.reliable and set(self.wanted) <= self.done and not puppet.holds:
                break
            self.advance(1.0)
        if self.reliable:
            assert set(self.wanted) <= self.done, "nothing is lost"
            assert self.desk.subscription.status().lag == 0
        assert self.desk.subscription.status().waiting == 0


class AtMostOnceAgainstModel(SubscriptionAgainstModel):
    reliable = False


SubscriptionAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
AtMostOnceAgainstModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSubscriptionAgainstModel = SubscriptionAgainstModel.TestCase
TestAtMostOnceAgainstModel = AtMostOnceAgainstModel.TestCase
