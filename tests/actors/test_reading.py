import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.actors.fakes import TOPIC, FakeRay, Journals, Office, run, turns, until

from raydispatch import Envelope
from raydispatch.actors import keeping
from raydispatch.actors import reading as module
from raydispatch.actors.keeping import RemoteKeeper
from raydispatch.actors.reading import RemoteReader
from raydispatch.delivery.letters import unpack_letter
from raydispatch.delivery.reader import Delivered
from raydispatch.errors import DispatchError, JournalUnavailable
from raydispatch.settings import Delivery

WIDE = Delivery(window=64)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[Office]]:
    """An office that nobody but readers take anything from."""
    monkeypatch.setattr(keeping, "RETRY_SECONDS", 0.01)
    fake, journals = FakeRay(monkeypatch), Journals(monkeypatch)
    return lambda: Office(fake, journals).open()


Opened = Callable[[], Awaitable[Office]]


def reader_of(
    name: str = "feed", topics: str = "**", delivery: Delivery = WIDE, start: Any = None, patience: float = 5.0
) -> RemoteReader:
    return RemoteReader(RemoteKeeper("shop", patience), name, topics, delivery, start)


async def taken(reader: RemoteReader, count: int) -> list[Delivered]:
    """So many messages."""
    found: list[Delivered] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            found += await reader.batch(count - len(found))
    return found


def payloads(messages: list[Delivered]) -> list[Any]:
    return [message.envelope.payload for message in messages]


async def until_acked(office: Office, count: int) -> None:
    async with asyncio.timeout(5):
        while (await office.subscription("feed")).acked != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


# Reading


def test_messages_come_in_order_with_all_that_they_had(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()
        envelope = Envelope({"n": 1}, message_type="Order", key="k", headers={"from": "web"})

        async with await reader_of().open() as reader:
            await office.send([(TOPIC, envelope), (TOPIC, Envelope(2, message_type="Order"))])
            first, second = await taken(reader, 2)

        assert (first.offset, second.offset, second.envelope.payload) == (0, 1, 2)
        found = first.envelope
        assert (found.topic, found.message_type, found.payload, found.key) == (TOPIC, "Order", {"n": 1}, "k")
        assert (found.message_id, found.correlation_id) == (envelope.message_id, envelope.correlation_id)
        assert (dict(found.headers), found.attempt) == ({"from": "web"}, 1)

    run(story())


def test_a_reader_is_an_iterator(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()
        found = []

        async with await reader_of().open() as reader:
            await office.publish(1, 2, 3)
            async for message in reader:
                message.ack()
                found.append(message.envelope.payload)
                if len(found) == 3:
                    break

        assert found == [1, 2, 3]

    run(story())


def test_only_what_fits_comes(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of(topics="*.order.**").open() as reader:
            await office.send([("dev.bill.events.v1", Envelope(1)), (TOPIC, Envelope(2))])

            assert payloads(await taken(reader, 1)) == [2]

    run(story())


def test_acknowledgements_gather(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of(delivery=Delivery(window=1_000)).open() as reader:
            await office.publish(*range(500))
            for message in await taken(reader, 500):
                message.ack()
            await until_acked(office, 500)

        assert office.handle.count("settle") <= 3

    run(story())


def test_no_more_is_delivered_than_the_window_allows(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of(delivery=Delivery(window=8)).open() as reader:
            await office.publish(*range(20))
            held = await taken(reader, 8)
            await turns(200)
            beyond = len(reader._waiting)
            for message in held:
                message.ack()
            rest = await taken(reader, 8)

        assert (payloads(held), beyond, payloads(rest)) == (list(range(8)), 0, list(range(8, 16)))

    run(story())


def test_what_is_not_acknowledged_comes_again_with_a_higher_attempt(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1)
            (first,) = await taken(reader, 1)
            first.nack(delay_seconds=0)
            (second,) = await taken(reader, 1)
            second.ack()
            await until_acked(office, 1)

        assert (first.envelope.attempt, second.envelope.attempt) == (1, 2)
        assert first.offset == second.offset

    run(story())


def test_what_is_rejected_is_a_dead_letter_with_the_reason(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1, 2)
            bad, good = await taken(reader, 2)
            bad.reject("no such customer")
            good.ack()
            await office.settled("feed")

        (letter,) = map(unpack_letter, await office.keeper.letters())
        assert (letter.envelope.payload, letter.outcome.dispatcher_id) == (1, "feed")
        assert letter.outcome.error_message == "no such customer"

    run(story())


def test_two_readers_of_one_name_share_what_comes(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as one, await reader_of().open() as other:
            await office.publish(*range(40))
            found = [await taken(reader, 1) for reader in (one, other)]
            await until(lambda: len(one._waiting) + len(other._waiting) == 38)
            found += [await one.batch(), await other.batch()]

        assert sorted(payload for messages in found for payload in payloads(messages)) == list(range(40))

    run(story())


def test_two_names_get_everything_each(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of("one").open() as one, await reader_of("other").open() as other:
            await office.publish(1, 2)

            assert [payloads(await taken(reader, 2)) for reader in (one, other)] == [[1, 2], [1, 2]]

    run(story())


# Leaving


def test_the_next_reader_goes_on_behind_what_was_acknowledged(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of(start="first").open() as reader:
            await office.publish(1, 2, 3)
            first, _, third = await taken(reader, 3)
            first.ack()
            third.ack()
        await office.publish(4)
        async with await reader_of(start="first").open() as reader:
            found = await taken(reader, 2)

        assert payloads(found) == [2, 4]
        assert found[0].envelope.attempt > 1
        assert found[1].envelope.attempt == 1

    run(story())


def test_a_delivery_to_a_reader_that_leaves_counts_once(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1)
            await taken(reader, 1)
        async with await reader_of().open() as reader:
            (again,) = await taken(reader, 1)

        assert again.envelope.attempt == 2

    run(story())


def test_a_reader_that_is_closed_ends_its_loop(shop: Opened) -> None:
    async def story() -> None:
        await shop()
        reader = await reader_of().open()
        waiting = asyncio.create_task(reader.batch())
        await turns()

        await reader.close()
        await reader.close()

        assert await waiting == []
        assert [message async for message in reader] == []

    run(story())


def test_closing_does_not_wait_for_a_keeper_that_is_gone_for_ever(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()
        reader = await reader_of(patience=0.05).open()
        office.fake.kill(office.handle)

        async with asyncio.timeout(2):
            await reader.close()

    run(story())


def test_a_last_word_that_makes_a_dead_letter_counts(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()
        office.journal.turns = 3  # As a disk takes its time.

        async with await reader_of().open() as reader:
            await office.publish(1)
            (message,) = await taken(reader, 1)
            message.reject("no such customer")

        assert len(await office.keeper.letters()) == 1

    run(story())


# A keeper that dies


def test_a_reader_survives_its_keeper(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1, 2, 3)
            first, _, _ = await taken(reader, 3)
            first.ack()
            await until_acked(office, 1)
            before = reader.consumer_id
            office.handle.crash()
            again = await taken(reader, 3)
            for message in again:
                message.ack()
            await office.publish(4)
            (fourth,) = await taken(reader, 1)
            fourth.ack()
            await office.settled("feed")

        # The cursor was not kept since: what was acknowledged comes again, too, and says so.
        assert payloads(again) == [1, 2, 3]
        assert {message.envelope.attempt for message in again} == {2}
        assert (fourth.envelope.payload, fourth.envelope.attempt > 0) == (4, True)
        assert reader.consumer_id != before

    run(story())


def test_what_was_fetched_and_not_read_when_the_keeper_died_comes_once(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1, 2, 3)
            await until(lambda: len(reader._waiting) == 3)
            office.handle.crash()
            await until(lambda: office.handle.lives == 2 and len(reader._waiting) == 3)
            found = await reader.batch()

        assert payloads(found) == [1, 2, 3]

    run(story())


def test_a_late_word_on_a_message_of_an_earlier_life_settles_it(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()

        async with await reader_of().open() as reader:
            await office.publish(1)
            (message,) = await taken(reader, 1)
            office.handle.crash()
            await until(lambda: reader._waiting)
            message.ack()
            await office.settled("feed")

    run(story())


def test_a_reader_that_is_not_reliable_gets_nothing_twice_when_its_keeper_dies(shop: Opened) -> None:
    async def story() -> None:
        office = await shop()
        await office.publish(1, 2)

        async with await reader_of(delivery=Delivery.exclusive(), start="first").open() as reader:
            before = await taken(reader, 2)
            joined = reader.consumer_id
            office.handle.crash()
            await until(lambda: reader.consumer_id != joined)
            await office.publish(3)
            after = await taken(reader, 1)

        assert (payloads(before), payloads(after)) == ([1, 2], [3])

    run(story())


def test_when_the_keeper_stays_away_the_reader_says_so(shop: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.05)

    async def story() -> None:
        office = await shop()
        reader = await reader_of(patience=0.05).open()

        office.fake.kill(office.handle)

        for _ in range(2):
            with pytest.raises(JournalUnavailable):
                await asyncio.wait_for(reader.batch(), 5)
        await reader.close()

    run(story())


def test_whatever_ends_the_fetching_is_told_to_the_loop_that_reads(
    shop: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        office = await shop()

        async def break_down(*_: object) -> None:
            raise KeyError("a bug")

        async with await reader_of().open() as reader:
            monkeypatch.setattr(office.keeper, "pull", break_down)
            reading = asyncio.create_task(reader.batch())
            done, _ = await asyncio.wait((reading,), timeout=1)

            assert done
            assert reading.exception() is not None

    run(story())


@pytest.mark.parametrize(
    ("options", "words"),
    [({"name": "a"}, "dispatcher's own"), ({"start": "yesterday"}, "A start is"), ({"topics": "a..b"}, "a..b")],
)
def test_what_cannot_be_read_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    fake, journals = FakeRay(monkeypatch), Journals(monkeypatch)

    async def story() -> None:
        await Office(fake, journals, "a").open()

        with pytest.raises(DispatchError, match=words):
            await reader_of(**options).open()

    run(story())
