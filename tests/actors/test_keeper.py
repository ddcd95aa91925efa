import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectStoreFullError, OutOfDiskError
from tests.actors.fakes import (
    MODEST,
    TOPIC,
    FakeHandle,
    FakeRay,
    FakeReplica,
    Journals,
    Office,
    payloads_of,
    run,
    turns,
    until,
)

from raydispatch import Envelope
from raydispatch.actors import keeper as module
from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.keeper import PulledConsumer, ReplicaConsumer, Settled, _AgainUntil, _part
from raydispatch.actors.plan import Target
from raydispatch.actors.targets import Infirmary
from raydispatch.actors.wire import Item as Answer
from raydispatch.delivery.consumer import ACKED, LOST, REFUSED, Ending, Item, Verdict
from raydispatch.delivery.letters import LetterFilter, pack_letter, unpack_letter
from raydispatch.delivery.memories import packed_note
from raydispatch.delivery.segment import Segment
from raydispatch.delivery.sharing import Entry
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.endpoints import EndpointState
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode, InvalidParameter, JournalUnavailable, NotRegistered
from raydispatch.messages.stored import restored, stored
from raydispatch.settings import Delivery, PoisonPolicy, RetrySettings

OPEN = Circuit(CircuitState.OPEN, 60.0)
FAILED = Outcome("a", DispatchStatus.DISPATCHER_ERROR, error_code=ErrorCode.HANDLER_EXCEPTION, error_type="OSError")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def journals(monkeypatch: pytest.MonkeyPatch) -> Journals:
    return Journals(monkeypatch)


@pytest.fixture
def office(fake: FakeRay, journals: Journals) -> Callable[..., Awaitable[Office]]:
    """Opens one with these dispatchers, each with one replica."""

    async def opened(*names: str, **options: Any) -> Office:
        return await Office(fake, journals, *names, **options).open()

    return opened


Opened = Callable[..., Awaitable[Office]]


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The readers'."""
    time = FakeTime()
    monkeypatch.setattr(module, "monotonic", time)
    return time


def gated() -> FakeReplica:
    replica = FakeReplica()
    replica.gate = asyncio.Event()
    return replica


def open_gate(replica: FakeReplica) -> None:
    assert replica.gate is not None
    replica.gate.set()


def failing(*payloads: object) -> Callable[[Any], Answer]:
    """Fails with these, or with everything."""
    return lambda payload: FAILED if not payloads or payload in payloads else 1.0


def item_of(payload: object, offset: int = 0, *, deliveries: int = 0, topic: str = TOPIC, route: str = "r") -> Item:
    blob = stored(Envelope(payload, message_type="Order"))
    return Item(Entry(offset, offset), topic, "Order", route, blob, deliveries)


# Opening


def test_what_is_wrong_with_a_journal_is_told(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        journals.faults = [InvalidParameter("There is no directory /nowhere.")]
        keeper = Office(fake, journals, "a").keeper

        told = await keeper.start()

        assert told == "InvalidParameter: There is no directory /nowhere."
        with pytest.raises(InvalidParameter, match="no directory"):
            await keeper.append([])

    run(story())


def test_a_keeper_that_is_born_while_its_journal_is_away_opens_it_later(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        journals.faults = [JournalUnavailable("no server answers")]
        office = Office(fake, journals, "a")

        await office.keeper.start()
        again = await office.keeper.start()
        await office.follow()
        await office.publish(1)

        assert again is None
        await until(lambda: office.got("a-1") == [1])

    run(story())


def test_a_plan_that_comes_before_the_journal_is_open_counts(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        office = Office(fake, journals, "a")
        office.journal.turns = 5

        await office.follow()
        assert await office.keeper.start() is None
        await office.publish(1)

        await until(lambda: office.got("a-1") == [1])

    run(story())


def test_a_plan_that_comes_while_the_first_one_is_adopted_counts(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        office = Office(fake, journals, "a")
        office.journal.turns = 10
        starting = asyncio.create_task(office.keeper.start())
        await until(lambda: office.keeper._post is not None and office.journal.calls)  # The first cursor is written.

        office.ways["b"] = MODEST
        office.join("b-1")
        await office.follow()
        assert await starting is None
        office.journal.turns = 0
        await office.publish(1)

        await until(lambda: office.got("a-1") == [1])
        await turns(200)
        assert office.got("b-1") == [1]

    run(story())


def test_a_keeper_that_is_born_again_asks_for_the_plan_and_goes_on_where_it_was(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        held = shop.join("a-2", gated())
        shop.handles["a"].pop("a-1")
        await shop.follow()
        await shop.publish(1, 2)
        await until(lambda: held.parts)

        shop.handle.crash()
        open_gate(held)
        assert await shop.handle.start.remote() is None
        await shop.settled("a")

        assert shop.handle.lives == 2
        assert held.payloads == [[1, 2], [1, 2]]
        assert [part.journaled.deliveries for part in held.parts if part.journaled] == [[0, 0], [1, 1]]

    run(story())


def test_without_a_controller_it_waits_until_it_is_told(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        office = Office(fake, journals, "a")
        office.is_planned = False

        assert await office.keeper.start() is None
        before = await office.keeper.status()
        await office.follow()
        await office.publish(1)

        assert before == ([], 0)
        await until(lambda: office.got("a-1") == [1])

    run(story())


# Plans


def test_every_dispatcher_gets_what_was_appended(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a", "b")

        await shop.publish(1, 2)
        await shop.settled("a", "b")

        assert (shop.got("a-1"), shop.got("b-1")) == ([1, 2], [1, 2])
        assert (await shop.subscription("a")).acked == 2

    run(story())


def test_a_part_says_what_came_from_the_journal_and_by_which_route(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        await shop.send([(TOPIC, Envelope(1, message_type="Order")), ("dev.bill.events.v1", Envelope("x"))])
        await shop.settled("a")

        (part,) = shop.replicas["a-1"].parts
        assert (part.keys, part.rows) == ([(TOPIC, "Order"), ("dev.bill.events.v1", "str")], [0, 1])
        assert (part.route_ids, part.resent, part.alone) == (["a:**", "a:**"], False, False)
        assert part.journaled == ([0, 0], False)

    run(story())


def test_a_replica_that_joins_takes_its_share(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        busy = shop.join("a-2", gated())
        await shop.follow()

        await shop.publish(*range(100))
        await until(lambda: len(shop.got("a-1")) + len(shop.got("a-2")) == 100)

        assert [len(payloads) for payloads in busy.payloads] == [4] * 4  # Its window.
        open_gate(busy)
        await shop.settled("a")

    run(story())


def test_a_replica_that_leaves_ends_what_it_has_and_gets_nothing_new(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        leaving = shop.join("a-2", gated())
        shop.handles["a"].pop("a-1")
        await shop.follow()
        await shop.publish(1)
        await until(lambda: leaving.parts)

        del shop.handles["a"]["a-2"]
        shop.join("a-3")
        await shop.follow()
        await shop.publish(2)
        await until(lambda: shop.got("a-3") == [2])
        both = await shop.subscription("a")
        open_gate(leaving)
        await shop.settled("a")
        await turns()

        assert (both.consumers, (await shop.subscription("a")).consumers) == (2, 1)
        assert (leaving.payloads, shop.got("a-3")) == ([[1]], [2])

    run(story())


def test_a_new_dispatcher_begins_with_what_comes_from_now_on(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await shop.publish(1)

        shop.ways["b"] = MODEST
        shop.join("b-1")
        await shop.follow()
        await shop.publish(2)
        await shop.settled("a", "b")

        assert (shop.got("a-1"), shop.got("b-1")) == ([1, 2], [2])

    run(story())


def test_a_dispatcher_that_is_gone_goes_on_where_it_was_when_it_comes_back(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a", "b")
        await shop.publish(1)
        await shop.settled("a", "b")

        way = shop.ways.pop("b")
        await shop.follow()
        await shop.publish(2)
        await shop.settled("a")
        gone = [one.name for one in (await shop.keeper.status())[0]]
        shop.ways["b"] = way
        await shop.follow()
        await shop.settled("b")

        assert gone == ["a"]
        assert shop.got("b-1") == [1, 2]

    run(story())


def test_changed_rules_of_delivery_make_a_new_subscription_from_the_same_place(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await shop.publish(1)
        await shop.settled("a")

        shop.ways["a"] = MODEST._replace(delivery=Delivery.reliable_exclusive(window=2))
        await shop.follow()
        await shop.publish(2, 3)
        await shop.settled("a")

        assert str((await shop.subscription("a")).mode) == "exclusive"
        assert shop.got("a-1") == [1, 2, 3]

    run(story())


def test_changed_rules_wait_for_what_is_under_way(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        busy = shop.join("a-2", gated())
        shop.handles["a"].pop("a-1")
        await shop.follow()
        await shop.publish(1)
        await until(lambda: busy.parts)

        shop.ways["a"] = MODEST._replace(poison=PoisonPolicy.DROP)
        following = asyncio.create_task(shop.follow())
        await turns()
        waits = not following.done()
        open_gate(busy)
        await following
        await shop.settled("a")

        assert (waits, busy.payloads) == (True, [[1]])

    run(story())


def test_plans_that_come_while_one_is_adopted_are_adopted_one_after_the_other(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        busy = shop.join("a-2", gated())
        shop.handles["a"].pop("a-1")
        await shop.follow()
        await shop.publish(1)
        await until(lambda: busy.parts)

        shop.ways["a"] = MODEST._replace(poison=PoisonPolicy.DROP)
        following = [asyncio.create_task(shop.follow())]  # Waits for what is under way.
        await turns()
        following.append(asyncio.create_task(shop.follow()))
        await turns()
        shop.ways["b"] = MODEST
        shop.join("b-1")
        following.append(asyncio.create_task(shop.follow()))
        await turns()
        open_gate(busy)
        ended = await asyncio.gather(*following, return_exceptions=True)
        await shop.publish(2)
        await until(lambda: shop.got("b-1") == [2])

        assert ended == [None] * 3

    run(story())


def test_an_older_plan_is_ignored(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        old = shop.plan()._replace(generation=0, replicas={"a": {}})

        await shop.keeper.follow(old)
        await shop.publish(1)

        await until(lambda: shop.got("a-1") == [1])

    run(story())


def holds() -> int:
    """Consumers that watch over a replica."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return sum(getattr(one, "__qualname__", "") == "ReplicaConsumer._hold_on" for one in coroutines)


def test_a_replica_that_has_left_is_watched_no_more(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a", "b")
        shop.join("a-2")
        await shop.follow()
        before = holds()

        del shop.handles["a"]["a-1"]
        await shop.follow()
        await turns()

        assert (before, holds()) == (3, 2)

    run(story())


def test_the_replicas_of_a_dispatcher_that_is_gone_are_watched_no_more(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a", "b")

        del shop.ways["b"]
        await shop.follow()
        await turns()

        assert holds() == 1

    run(story())


def test_changed_rules_leave_one_watch_on_each_replica(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        shop.ways["a"] = MODEST._replace(poison=PoisonPolicy.DROP)
        await shop.follow()
        await turns()

        assert holds() == 1

    run(story())


# Circuits


def test_nothing_is_sent_to_an_open_circuit(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        await shop.keeper.follow_circuit("a", OPEN)
        await shop.publish(1)
        await turns(100)
        before = shop.got("a-1")
        await shop.keeper.follow_circuit("a", CLOSED)

        assert before == []
        await until(lambda: shop.got("a-1") == [1])

    run(story())


def test_word_of_a_dispatcher_that_it_does_not_know_is_nothing(office: Opened) -> None:
    async def story() -> None:
        await (await office("a")).keeper.follow_circuit("z", OPEN)

    run(story())


# Publishing, and what survives


def test_what_is_published_again_is_kept_once(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        messages = [(TOPIC, Envelope(1, message_type="Order"))]

        for _ in range(3):
            await shop.send(messages)
        await shop.settled("a")

        assert shop.got("a-1") == [1]

    run(story())


def test_many_segments_of_one_call_are_kept_together(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        await asyncio.gather(*(shop.publish(number) for number in range(50)))
        await shop.settled("a")

        assert sorted(shop.got("a-1")) == list(range(50))
        assert shop.journal.appends <= 3

    run(story())


def segment_of(payload: object) -> list[bytes]:
    return [Segment.of([(TOPIC, Envelope(payload, message_type="Order"))]).pack()]


def kept(shop: Office) -> list[Any]:
    """The payloads in the journal, in order."""
    segments = [Segment.unpack(one.data) for one in shop.journal.batches]
    return [restored(blob, TOPIC, "Order").payload for segment in segments for blob in segment.blobs]


def test_calls_of_one_publisher_are_kept_in_the_order_of_their_numbers(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        await asyncio.gather(*(shop.keeper.append(segment_of(number), "web", number) for number in (2, 0, 1, 4, 3)))

        assert kept(shop) == [0, 1, 2, 3, 4]

    run(story())


def test_publishers_do_not_wait_for_each_other(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        waiting = asyncio.create_task(shop.keeper.append(segment_of("late"), "web", 1))
        await turns()

        await shop.keeper.append(segment_of("other"), "batch", 0)
        await shop.keeper.append(segment_of("early"), "web", 0)
        await waiting

        assert kept(shop) == ["other", "early", "late"]

    run(story())


def test_a_call_that_never_comes_is_waited_for_only_so_long(office: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.05)

    async def story() -> None:
        shop = await office("a")

        await asyncio.gather(*(shop.keeper.append(segment_of(number), "web", number) for number in (0, 2)))
        await shop.keeper.append(segment_of(1), "web", 1)

        assert kept(shop) == [0, 2, 1]

    run(story())


def test_a_keeper_that_was_born_again_waits_for_nothing_that_was_before(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        async with asyncio.timeout(0.5):
            await shop.keeper.append(segment_of(1), "web", 7_001)
            await shop.keeper.append(segment_of(2), "web", 7_002)

        assert kept(shop) == [1, 2]

    run(story())


def test_publishers_that_were_not_heard_of_for_longest_are_forgotten(
    office: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LANES", 3)

    async def story() -> None:
        shop = await office("a")

        for number in range(10):
            await shop.keeper.append(segment_of(number), f"web-{number}", 0)

        assert len(shop.keeper._lanes._lanes) == 3

    run(story())


def test_a_message_waits_until_it_is_due(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        await shop.publish("late", due=datetime.now(UTC).timestamp() + 0.2)
        await shop.publish("now")
        await until(lambda: shop.got("a-1"))
        first = shop.got("a-1")
        await shop.settled("a")

        assert (first, shop.got("a-1")) == (["now"], ["now", "late"])

    run(story())


def test_closing_keeps_the_cursors_and_lets_the_journal_go(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await shop.publish(1, 2)
        await shop.settled("a")

        assert await shop.keeper.close(1.0)
        again = await shop.keeper.close(1.0)
        shop.handle.crash()
        await shop.open()
        await shop.publish(3)
        await shop.settled("a")

        assert (again, shop.journal.closes) == (True, 1)
        assert shop.got("a-1") == [1, 2, 3]
        assert [part.journaled.deliveries for part in shop.replicas["a-1"].parts if part.journaled][-1] == [0]

    run(story())


def test_a_keeper_without_its_journal_can_be_closed(fake: FakeRay, journals: Journals) -> None:
    async def story() -> None:
        journals.faults = [InvalidParameter("There is no directory /nowhere.")]

        assert not await Office(fake, journals, "a").keeper.close(1.0)

    run(story())


def test_draining_delivers_nothing_more_and_waits_for_what_is_under_way(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        busy = shop.join("a-2", gated())
        shop.handles["a"].pop("a-1")
        await shop.follow()
        await shop.publish(1)
        await until(lambda: busy.parts)

        too_short = await shop.keeper.drain(0.01)
        draining = asyncio.create_task(shop.keeper.drain(5.0))
        await shop.publish(2)
        await turns()
        open_gate(busy)

        assert (too_short, await draining) == (False, True)
        assert busy.payloads == [[1]]

    run(story())


def test_notes_of_dispatchers_outlive_the_keeper(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        note = packed_note(Envelope(1).message_id, Outcome("a", DispatchStatus.SUCCESS))

        await shop.keeper.note("a", [note])
        at_once = await shop.keeper.recall("a")
        await shop.keeper.close(1.0)
        shop.handle.crash()
        await shop.open()

        assert at_once == await shop.keeper.recall("a") == [note]
        assert await shop.keeper.recall("b") == []

    run(story())


# Failures


def test_what_fails_is_tried_again_and_then_a_dead_letter(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        shop.join("a-1", FakeReplica(failing(2)))
        shop.handle.crash()
        await shop.open()

        await shop.publish(1, 2, 3)
        await shop.settled("a")
        await until_counted(shop, 1)

        assert sorted(shop.got("a-1")) == [1, 2, 2, 3]
        (letter,) = map(unpack_letter, await shop.keeper.letters())
        assert (letter.envelope.payload, letter.envelope.attempt) == (2, 2)
        assert (letter.outcome.dispatcher_id, letter.outcome.error_type, letter.outcome.attempts) == ("a", "OSError", 2)
        assert letter.table_version == shop.plan().table.version

    run(story())


async def until_counted(shop: Office, letters: int) -> None:
    async with asyncio.timeout(5):
        while (await shop.keeper.status())[1] != letters:  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_dead_letters_are_found_redriven_and_purged(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a", "b")
        answers: dict[str, Callable[[Any], Answer]] = {"now": failing()}
        sick = FakeReplica(lambda payload: answers["now"](payload))
        shop.handles["a"] = {}
        shop.join("a-2", sick)
        await shop.follow()
        await shop.publish(1, 2, 3)
        await until_counted(shop, 3)

        found = await shop.keeper.letters(LetterFilter(dispatcher_id="a"), most=2)
        other = await shop.keeper.letters(LetterFilter(dispatcher_id="b"))
        first = unpack_letter(found[0]).envelope
        answers["now"] = lambda payload: 1.0
        driven = await shop.keeper.redrive(LetterFilter(message_id=first.message_id))
        again = await shop.keeper.redrive(LetterFilter(message_id=first.message_id))
        await shop.settled("a")
        purged = await shop.keeper.purge()

        assert (len(found), other, driven, again, purged) == (2, [], 1, 0, 2)
        assert (await shop.keeper.letters(), shop.got("b-1")) == ([], [1, 2, 3])
        assert sick.payloads[-1] == [first.payload]

    run(story())


def test_a_letter_that_was_made_elsewhere_is_kept(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await_letter = make_letter()

        await shop.keeper.bury([await_letter])

        assert await shop.keeper.letters() == [await_letter]

    run(story())


def make_letter() -> bytes:
    from raydispatch.delivery.dead_letters import DeadLetter

    now = datetime.now(UTC)
    return pack_letter(DeadLetter(TOPIC, Envelope(1, message_type="Order", topic=TOPIC), FAILED, now, now, "v"))


def test_what_a_lost_replica_had_goes_to_another_and_it_is_asked_until_it_is_well(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        shop.handles["a"]["a-1"].crash_at("process")

        await shop.publish(1)
        await shop.settled("a")
        await shop.publish(2)
        await shop.settled("a")

        assert shop.got("a-1") == [1, 2]
        assert shop.handles["a"]["a-1"].count("ping") == 1

    run(story())


def test_messages_that_were_lost_together_come_again_one_by_one(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        shop.handles["a"]["a-1"].crash_at("process")

        await shop.publish(1, 2, 3)
        await shop.settled("a")

        parts = shop.replicas["a-1"].parts
        assert shop.replicas["a-1"].payloads == [[1], [2], [3]]
        assert [(part.alone, part.journaled) for part in parts] == [(True, ([1], False))] * 3

    run(story())


def test_a_replay_runs_what_was_there_again_and_says_so(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await shop.publish(1, 2)
        await shop.settled("a")

        offset = await shop.keeper.replay("a", "first")
        await shop.settled("a")
        await shop.publish(3)
        await shop.settled("a")

        assert offset == 0
        assert shop.got("a-1") == [1, 2, 1, 2, 3]
        marks = [part.journaled.again for part in shop.replicas["a-1"].parts if part.journaled]
        assert marks == [False, True, False]

    run(story())


def test_what_is_not_there_cannot_be_replayed(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        with pytest.raises(NotRegistered, match="There is no subscription 'z'"):
            await shop.keeper.replay("z", "first")

    run(story())


# Readers


async def read(shop: Office, name: str = "feed", **options: Any) -> str:
    return await shop.keeper.consume(
        name, options.get("topics", "**"), options.get("delivery", Delivery(window=4)), options.get("start")
    )


async def pulled(shop: Office, reader: str, most: int = 100, acks: tuple[int, ...] = ()) -> list[tuple[int, Any]]:
    """Offset and payload of each."""
    await shop.keeper.settle(reader, acked(*acks))
    found = await shop.keeper.pull(reader, most, 1.0)
    payloads = [restored(blob, *found.keys[code]).payload for code, blob in zip(found.codes, found.blobs, strict=True)]
    return list(zip(found.offsets, payloads, strict=True))


def acked(*offsets: int) -> Settled:
    return Settled(list(offsets), [])


def test_a_reader_fetches_what_fits_and_acknowledges_it(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop, topics="*.order.**")
        await shop.send([(TOPIC, Envelope(1)), ("dev.bill.events.v1", Envelope(2)), (TOPIC, Envelope(3))])

        first = await pulled(shop, reader)
        before = await shop.subscription("feed")
        await shop.keeper.settle(reader, acked(0, 2))

        assert first == [(0, 1), (2, 3)]
        assert (before.in_flight, before.acked) == (2, 0)
        after = await shop.subscription("feed")
        assert (after.in_flight, after.acked, after.lag) == (0, 2, 0)

    run(story())


def test_a_reader_takes_so_many_at_a_time_and_no_more_than_its_window(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop)
        await shop.publish(*range(10))

        first = await pulled(shop, reader, most=3)
        second = await pulled(shop, reader, most=100)
        third = await pulled(shop, reader, most=100, acks=(0, 1, 2, 3))

        assert [[payload for _, payload in one] for one in (first, second)] == [[0, 1, 2], [3]]
        assert 1 <= len(third) <= 4

    run(story())


def test_a_fetch_waits_for_a_while(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop)

        nothing = await shop.keeper.pull(reader, 10, 0.01)
        fetching = asyncio.create_task(shop.keeper.pull(reader, 10, 5.0))
        await shop.publish(1)

        assert nothing.offsets == []
        assert (await fetching).offsets == [0]

    run(story())


def test_readers_of_one_name_share(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        one, other = await read(shop), await read(shop)

        await shop.publish(*range(8))
        first, second = await pulled(shop, one), await pulled(shop, other)

        assert one != other
        assert sorted(payload for _, payload in first + second) == list(range(8))
        assert len(first) == len(second) == 4

    run(story())


def test_what_a_reader_held_goes_to_the_others_when_it_leaves(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        one = await read(shop)
        await shop.publish(1, 2)
        held = await pulled(shop, one)
        other = await read(shop)

        await shop.keeper.leave(one, acked(held[0][0]))
        again = await shop.keeper.pull(other, 10, 1.0)

        assert (again.offsets, again.deliveries) == ([held[1][0]], [1])
        with pytest.raises(NotRegistered):
            await pulled(shop, one)
        await shop.keeper.leave(one, acked())  # Twice is no fault.

    run(story())


def test_a_subscription_of_readers_goes_on_where_it_was(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop)
        await shop.publish(1, 2)
        await shop.keeper.leave(reader, acked((await pulled(shop, reader))[0][0]))
        gone = [one.name for one in (await shop.keeper.status())[0]]
        await shop.publish(3)

        found = await pulled(shop, await read(shop, start="head"))
        found += await pulled(shop, next(iter(shop.keeper._readers))) if len(found) < 2 else []

        assert gone == ["a"]
        assert [payload for _, payload in found] == [2, 3]

    run(story())


def test_a_reader_may_begin_anywhere(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await shop.publish(0)
        await shop.publish(1)
        later = datetime.now(UTC) + timedelta(hours=1)

        starts = {"first": "first", "one": 1, "head": "head", "later": later, "default": None}
        readers = {name: await read(shop, name, start=start) for name, start in starts.items()}
        await shop.publish(2)

        found = {name: [payload for _, payload in await pulled(shop, reader)] for name, reader in readers.items()}
        assert found == {"first": [0, 1, 2], "one": [1, 2], "head": [2], "later": [2], "default": [2]}

    run(story())


@pytest.mark.parametrize("start", ["yesterday", -1, 1.5])
def test_a_start_that_is_none_is_refused(office: Opened, start: Any) -> None:
    async def story() -> None:
        shop = await office("a")

        with pytest.raises(InvalidParameter, match="A start is"):
            await read(shop, start=start)
        assert [one.name for one in (await shop.keeper.status())[0]] == ["a"]

    run(story())


def test_a_reader_that_was_not_heard_of_for_too_long_is_gone(office: Opened, time: FakeTime) -> None:
    async def story() -> None:
        shop = await office("a")
        silent, other = await read(shop), await read(shop)
        await shop.publish(1, 2)
        await until(lambda: len(shop.keeper._readers) == 2)
        held = await pulled(shop, silent)
        time.advance(4.9)
        mine = await pulled(shop, other)

        time.advance(0.2)
        await until(lambda: silent not in shop.keeper._readers)
        again = await pulled(shop, other)

        assert (len(held), len(mine)) == (1, 1)
        assert again == held
        with pytest.raises(NotRegistered):
            await pulled(shop, silent)

    run(story())


def test_leases_are_watched_on_when_a_reader_leaves_at_the_moment_it_expires(office: Opened, time: FakeTime) -> None:
    async def story() -> None:
        shop = await office("a")
        keeper = shop.keeper
        first, second = await read(shop), await read(shop)
        async with keeper._changing:  # As if a plan were being adopted.
            time.advance(6)
            await until(lambda: first not in keeper._readers)
            leaving = asyncio.create_task(keeper.leave(second, acked()))
            await turns()
        await leaving

        third = await read(shop)
        time.advance(6)

        await until(lambda: third not in keeper._readers)

    run(story())


def test_a_name_of_a_dispatcher_is_none_for_readers(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")

        with pytest.raises(InvalidParameter, match="'a' is a dispatcher's own subscription: choose another name"):
            await read(shop, "a")

    run(story())


def test_a_dispatcher_may_take_the_name_of_a_reader(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        await read(shop, "b", delivery=MODEST.delivery)
        shop.ways["b"] = MODEST._replace(retry=RetrySettings())
        shop.join("b-1")

        await shop.follow()
        await shop.publish(1)

        await until(lambda: shop.got("b-1") == [1])

    run(story())


def test_it_knows_what_readers_want(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        nobody = await shop.keeper.has_reader(TOPIC, "Order")
        reader = await read(shop, topics="*.order.**")
        wanted = [await shop.keeper.has_reader(topic, "Order") for topic in (TOPIC, "dev.bill.events.v1")]

        await shop.keeper.leave(reader, acked())

        assert (nobody, wanted) == (False, [True, False])
        assert not await shop.keeper.has_reader(TOPIC, "Order")

    run(story())


def test_what_a_reader_rejects_is_a_dead_letter_of_its_name(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop)
        await shop.publish(1)
        ((offset, _),) = await pulled(shop, reader)

        await shop.keeper.settle(reader, Settled([], [(offset, Verdict(Ending.FAILED, FAILED, is_final=True))]))
        await until_counted(shop, 1)

        (letter,) = map(unpack_letter, await shop.keeper.letters(LetterFilter(dispatcher_id="feed")))
        assert letter.envelope.payload == 1

    run(story())


def test_a_replay_gives_readers_everything_again(office: Opened) -> None:
    async def story() -> None:
        shop = await office("a")
        reader = await read(shop)
        await shop.publish(1, 2, 3)
        first = await pulled(shop, reader)
        await shop.keeper.settle(reader, acked(0))

        await shop.keeper.replay("feed", 1)
        again = await pulled(shop, reader)
        await shop.keeper.settle(reader, acked(0, 1, 2))
        after = await shop.subscription("feed")

        assert [payload for _, payload in first] == [1, 2, 3]
        assert [payload for _, payload in again] == [2, 3]
        assert (after.in_flight, after.lag) == (0, 0)

    run(story())


# A consumer that fetches


class Told:
    """Hears verdicts."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[int, Ending]] = []
        self.calls = 0

    def __call__(self, seat_id: str, items: list[Item], verdicts: list[Verdict]) -> None:
        self.calls += 1
        self.verdicts += [(item.entry.offset, one.ending) for item, one in zip(items, verdicts, strict=True)]


def test_verdicts_on_what_is_not_held_are_ignored() -> None:
    told = Told()
    consumer = PulledConsumer("feed-1")
    consumer.settle(acked(5))
    consumer.take([item_of(1, 5), item_of(2, 6)], told)

    consumer.settle(acked(5, 5, 9))
    consumer.settle(Settled([5], [(5, Verdict(Ending.FAILED))]))

    assert told.verdicts == [(5, Ending.ACKED)]


def test_verdicts_are_told_together() -> None:
    told = Told()
    consumer = PulledConsumer("feed-1")
    consumer.take([item_of(number, number) for number in range(3)], told)

    consumer.settle(Settled([2, 0], [(1, Verdict(Ending.FAILED))]))

    assert (told.calls, told.verdicts) == (2, [(2, Ending.ACKED), (0, Ending.ACKED), (1, Ending.FAILED)])


# A replica as a consumer


class Place:
    """A replica's place in a subscription, without the subscription."""

    def __init__(self, replica: FakeReplica | None = None, handle: FakeHandle | None = None) -> None:
        self.replica = replica or FakeReplica()
        self.handle = handle or FakeHandle(lambda: self.replica)
        self.target = Target("a")
        self.target.endpoints.join("a-1", self.handle)
        self.changes = 0
        self.infirmary = Infirmary(lambda: {"a": self.target}, self._changed)
        self.until = _AgainUntil()
        (endpoint,) = self.target.endpoints.all()
        self.consumer = ReplicaConsumer(endpoint, self.target, self.infirmary, self.until)
        self.told: list[list[Verdict]] = []

    def _changed(self) -> None:
        self.changes += 1

    async def take(self, *items: Item) -> list[Verdict]:
        self.consumer.take(list(items), lambda seat_id, items, verdicts: self.told.append(verdicts))
        await until(lambda: self.told)
        return self.told.pop()


def test_answers_of_a_replica_are_verdicts() -> None:
    async def story() -> None:
        answers: list[Answer | None] = [1.0, Outcome("a", DispatchStatus.SKIPPED), None, FAILED]
        place = Place(FakeReplica(lambda payload: answers[payload]))

        verdicts = await place.take(*(item_of(number, number) for number in range(4)))

        assert verdicts == [ACKED, ACKED, REFUSED, Verdict(Ending.FAILED, FAILED)]

    run(story())


def test_a_consumer_says_whether_it_is_idle_and_counts_what_is_under_way() -> None:
    async def story() -> None:
        place = Place(gated())
        before = place.consumer.is_idle

        taking = asyncio.create_task(place.take(item_of(1, 1), item_of(2, 2)))
        await until(lambda: place.replica.parts)
        busy = (place.consumer.is_idle, place.consumer.endpoint.in_flight)
        open_gate(place.replica)
        await taking
        await turns()

        assert (before, busy) == (True, (False, 2))
        assert (place.consumer.is_idle, place.consumer.endpoint.in_flight) == (True, 0)

    run(story())


def test_a_lost_replica_is_quarantined_until_it_answers_again() -> None:
    async def story() -> None:
        place = Place()
        place.handle.crash_at("process")

        verdicts = await place.take(item_of(1), item_of(2, 1))
        sick = place.consumer.is_well()
        await until(place.consumer.is_well)
        await until(lambda: place.changes)

        assert (verdicts, sick) == ([LOST, LOST], False)

    run(story())


def test_a_replica_that_dies_while_it_has_nothing_to_do_is_noticed_at_once() -> None:
    async def story() -> None:
        place = Place()
        await until(lambda: place.handle.count("linger"))
        place.handle.hold("ping")

        place.handle.crash()
        await until(lambda: not place.consumer.is_well())
        place.handle.release("ping")
        await until(place.consumer.is_well)
        await until(lambda: place.handle.count("linger") == 2)

        assert place.changes == 1

    run(story())


class Late:
    """A handle whose process dies when it is told to, and whose other calls wait for the next one, as Ray's do."""

    def __init__(self) -> None:
        self.death = asyncio.get_running_loop().create_future()
        self.begun: list[asyncio.Future[Any]] = []

    @property
    def linger(self) -> "Late":
        return self

    def remote(self) -> "asyncio.Future[None]":
        return self.death

    @property
    def process(self) -> "Late":
        return _Process(self)


class _Process(Late):
    def __init__(self, late: Late) -> None:
        self._late = late

    def remote(self, *_: Any) -> "asyncio.Future[Any]":
        self._late.begun.append(asyncio.get_running_loop().create_future())
        return self._late.begun[-1]


def test_what_came_too_late_for_a_process_does_not_wait_for_the_next_one(fake: FakeRay) -> None:
    async def story() -> None:
        late = Late()
        place = Place(handle=late)  # type: ignore[arg-type]
        taking = asyncio.create_task(place.take(item_of(1), item_of(2, 1)))
        await until(lambda: late.begun)

        late.death.set_exception(ActorDiedError())

        assert await taking == [LOST, LOST]
        assert fake.cancelled == late.begun
        assert not place.consumer.is_well()

    run(story())


def test_one_that_was_let_go_is_watched_no_more() -> None:
    async def story() -> None:
        place = Place()
        await until(lambda: place.handle.count("linger"))

        place.consumer.let_go()
        await turns()
        place.handle.crash()
        await turns()

        assert place.consumer.is_well()

    run(story())


def test_an_error_of_ray_itself_is_a_loss() -> None:
    async def story() -> None:
        place = Place(FakeReplica(lambda payload: 1 / payload))

        assert await place.take(item_of(0)) == [LOST]

    run(story())


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("full")])
def test_a_full_store_is_no_fault_of_the_replica(error: Exception) -> None:
    class Full:
        class process:  # noqa: N801 - as a method of a handle
            @staticmethod
            def remote(part: Any) -> Any:
                raise error

    async def story() -> None:
        place = Place(handle=Full())  # type: ignore[arg-type]

        verdicts = await place.take(item_of(1))

        assert (verdicts, place.consumer.is_well()) == ([REFUSED], True)
        assert place.consumer.endpoint.in_flight == 0

    run(story())


@pytest.mark.parametrize(
    ("circuit", "is_well"),
    [
        (CLOSED, True),
        (OPEN, False),
        (Circuit(CircuitState.OPEN, 0.0), True),
        (Circuit(CircuitState.HALF_OPEN, 0.0, "a-1"), True),
        (Circuit(CircuitState.HALF_OPEN, 0.0, "a-2"), False),
        (Circuit(CircuitState.OPEN, 60.0, "a-1"), False),
    ],
)
def test_a_circuit_decides_who_gets_messages(circuit: Circuit, is_well: bool) -> None:
    async def story() -> None:
        place = Place()
        place.target.endpoints.join("a-2", place.handle)

        place.target.follow(circuit)

        assert place.consumer.is_well() is is_well

    run(story())


def test_a_trial_replica_that_is_gone_holds_up_nobody() -> None:
    async def story() -> None:
        place = Place()

        place.target.follow(Circuit(CircuitState.HALF_OPEN, 0.0, "a-2"))

        assert place.target.pick() is place.consumer.endpoint
        assert place.consumer.is_well()

    run(story())


def test_one_that_leaves_or_is_sick_gets_nothing() -> None:
    async def story() -> None:
        place = Place()

        place.target.endpoints.quarantine("a-1")
        sick = place.consumer.is_well()
        place.target.endpoints.restore("a-1")
        place.target.endpoints.begun(place.consumer.endpoint)
        place.target.endpoints.leave("a-1")

        assert place.consumer.endpoint.state is EndpointState.LEAVING
        assert (sick, place.consumer.is_well()) == (False, False)

    run(story())


# Parts


def test_messages_of_one_topic_and_type_share_a_key() -> None:
    items = [item_of(1, 1), item_of(2, 2, topic="dev.bill.events.v1", route="s"), item_of(3, 3, deliveries=4)]

    part = _part(items, again_until=0)

    assert (part.keys, part.rows) == ([(TOPIC, "Order"), ("dev.bill.events.v1", "Order")], [0, 1, 0])
    assert (part.route_ids, part.journaled) == (["r", "s"], ([0, 0, 4], False))
    assert payloads_of(part) == [1, 2, 3]


def test_a_suspect_runs_alone() -> None:
    suspect = item_of(1, 1)
    suspect.entry.is_suspect = True

    assert _part([suspect], 0).alone
    assert not _part([item_of(1, 1)], 0).alone


def test_what_is_replayed_is_marked() -> None:
    def again(offset: int) -> bool:
        journaled = _part([item_of(1, offset)], again_until=10).journaled
        assert journaled is not None
        return journaled.again

    assert (again(9), again(10)) == (True, False)


def test_what_is_replayed_is_marked_wherever_it_stands_in_its_part() -> None:
    part = _part([item_of(1, 12), item_of(2, 3)], again_until=10)

    assert part.journaled is not None
    assert part.journaled.again


def test_a_keeper_is_an_actor_of_a_process(office: Opened) -> None:
    import os

    async def story() -> None:
        assert await (await office("a")).keeper.pid() == os.getpid()

    run(story())
