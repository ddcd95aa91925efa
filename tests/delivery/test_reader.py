"""Readers: messages one by one or in batches, and a word on each."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from tests.delivery.fakes import turns

from raydispatch.delivery.consumer import ACKED, Ending, Item, Verdict
from raydispatch.delivery.reader import LocalReader, envelope_of
from raydispatch.delivery.sharing import Entry
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import stored

TOPIC = "dev.order.events.v1"


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def item(number: int, deliveries: int = 0, attempt: int = 1) -> Item:
    envelope = Envelope(number, "Placed", TOPIC, message_id=UUID(int=number), attempt=attempt)
    return Item(Entry(number, 0), TOPIC, "Placed", "", stored(envelope), deliveries)


class Shelf:
    """A reader, and what it said."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Verdict]] = []
        self.left = 0
        self.reader = LocalReader("feed", "feed-1", self._leave)

    def bring(self, *items: Item) -> None:
        self.reader.take(list(items), self._tell)

    def _tell(self, seat_id: str, items: list[Item], verdicts: list[Verdict]) -> None:
        assert seat_id == "feed-1"
        self.said += [(one.entry.offset, verdict) for one, verdict in zip(items, verdicts, strict=True)]

    async def _leave(self) -> None:
        self.left += 1


# Reading


def test_a_batch_is_what_is_there() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1), item(2))
        shelf.bring(item(3))

        batch = await shelf.reader.batch()

        assert [one.envelope.payload for one in batch] == [1, 2, 3]
        assert [one.offset for one in batch] == [1, 2, 3]

    run(story())


def test_a_batch_has_no_more_than_is_asked_for() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(*map(item, range(5)))

        sizes = [len(await shelf.reader.batch(most)) for most in (2, 2, 2)]

        assert sizes == [2, 2, 1]

    run(story())


def test_a_batch_waits_for_the_first_message() -> None:
    async def story() -> None:
        shelf = Shelf()
        reading = asyncio.ensure_future(shelf.reader.batch())
        await turns()
        assert not reading.done()

        shelf.bring(item(1))

        assert [one.envelope.payload for one in await reading] == [1]

    run(story())


def test_messages_can_be_read_one_by_one() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1), item(2), item(3))

        payloads = []
        async for message in shelf.reader:
            payloads.append(message.envelope.payload)
            if len(payloads) == 3:
                await shelf.reader.close()

        assert payloads == [1, 2, 3]

    run(story())


def test_two_who_read_get_different_messages() -> None:
    async def story() -> None:
        shelf = Shelf()
        readers = [asyncio.ensure_future(shelf.reader.batch(1)) for _ in range(2)]
        await turns()

        shelf.bring(item(1), item(2))
        batches = await asyncio.gather(*readers)

        assert sorted(one.envelope.payload for batch in batches for one in batch) == [1, 2]

    run(story())


@pytest.mark.parametrize(("attempt", "deliveries", "expected"), [(1, 0, 1), (1, 2, 3), (3, 0, 3), (3, 1, 4)])
def test_a_message_knows_the_number_of_its_delivery(attempt: int, deliveries: int, expected: int) -> None:
    assert envelope_of(item(1, deliveries, attempt)).attempt == expected


# Closing


def test_a_reader_that_is_closed_takes_no_more() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1))

        await shelf.reader.close()
        await shelf.reader.close()

        assert (shelf.left, shelf.reader.is_well()) == (1, False)
        assert await shelf.reader.batch() == []
        assert [message async for message in shelf.reader] == []

    run(story())


def test_closing_wakes_who_waits() -> None:
    async def story() -> None:
        shelf = Shelf()
        batch = asyncio.ensure_future(shelf.reader.batch())
        loop = asyncio.ensure_future(anext(shelf.reader, None))
        await turns()

        await shelf.reader.close()

        assert (await batch, await loop) == ([], None)

    run(story())


def test_a_reader_is_closed_at_the_end_of_its_block() -> None:
    async def story() -> None:
        shelf = Shelf()

        async with shelf.reader as reader:
            assert reader is shelf.reader
            assert shelf.left == 0

        assert shelf.left == 1

    run(story())


# A word on each


@pytest.mark.parametrize(
    ("speak", "verdict"),
    [
        (lambda message: message.ack(), ACKED),
        (lambda message: message.nack(), Verdict(Ending.FAILED)),
        (lambda message: message.nack(7.5), Verdict(Ending.FAILED, None, 7.5)),
        (lambda message: message.nack(delay_seconds=0), Verdict(Ending.FAILED, None, 0)),
        (lambda message: message.reject("no such customer"), Verdict(Ending.FAILED, is_final=True)),
    ],
)
def test_a_word_becomes_a_verdict(speak: Callable[[Any], None], verdict: Verdict) -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1), item(2))
        _, second = await shelf.reader.batch()

        speak(second)

        ((offset, said),) = shelf.said
        assert offset == 2
        assert said._replace(outcome=None) == verdict

    run(story())


def test_a_rejection_has_its_reason_without_secrets() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1))
        (message,) = await shelf.reader.batch()

        message.reject("login failed: password=hunter2")

        outcome = shelf.said[0][1].outcome
        assert outcome is not None
        assert outcome.status is DispatchStatus.DISPATCHER_ERROR
        assert outcome.error_message == "login failed: password=[REDACTED]"

    run(story())


def test_a_word_may_come_late_and_in_any_order() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(*map(item, range(4)))
        first = await shelf.reader.batch(2)
        second = await shelf.reader.batch(2)

        for message in (*reversed(second), *first):
            message.ack()

        assert [offset for offset, _ in shelf.said] == [3, 2, 0, 1]

    run(story())


def test_a_word_from_another_thread_is_a_mistake() -> None:
    async def story() -> None:
        shelf = Shelf()
        shelf.bring(item(1))
        (message,) = await shelf.reader.batch()
        with ThreadPoolExecutor(1) as thread:
            saying = asyncio.get_running_loop().run_in_executor(thread, message.ack)

            with pytest.raises(InvalidState, match="event loop"):
                await saying

        assert shelf.said == []

    run(story())
