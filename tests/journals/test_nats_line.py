"""Servers that go away, come back, say nothing, or hang up."""

import asyncio
import logging
import os
from time import monotonic
from typing import Any

import pytest
from tests.journals.helping import (
    NatsServer,
    Place,
    batch,
    check_contiguous,
    free_port,
    open_nats,
    read_all,
    run,
    until,
)

from raydispatch.delivery.journal import Batch, Change
from raydispatch.errors import InvalidParameter, InvalidState, JournalUnavailable
from raydispatch.journals.nats_address import NatsAddress
from raydispatch.journals.nats_line import IN_FLIGHT_BYTES, Letter, Line, NobodyListens, portions


def own_place(server: NatsServer) -> Place:
    """That gives up soon."""
    return server.url.replace("timeout=2", "timeout=0.5"), "orders"


async def works(journal: Any) -> bool:
    try:
        await journal.append([batch()])
        await journal.write([Change("b", "key", b"")])
    except JournalUnavailable:
        return False
    return True


# Servers that go away


def test_a_server_that_is_frozen_is_unavailable_soon_and_fine_later(own_server: NatsServer) -> None:
    async def story() -> None:
        async with open_nats(own_place(own_server)) as journal:
            await journal.append([batch(b"before")])
            own_server.freeze()

            calls = [journal.append([batch(b"meanwhile")]), journal.read(0), journal.trim(0)]
            calls += [journal.documents("b"), journal.write([Change("b", "key", b"")])]
            for call in calls:
                begun = monotonic()
                with pytest.raises(JournalUnavailable, match=r"did not answer within 0.5 s"):
                    await call
                assert monotonic() - begun < 5

            own_server.resume()
            await until(lambda: works(journal))
            found = await read_all(journal)
            check_contiguous(found)
            # What was on its way was kept, after all.
            assert [one.data for one in found][:3] == [b"before", b"meanwhile", b"data"]

    run(story())


def test_a_frozen_server_does_not_hold_up_large_batches_or_the_end(own_server: NatsServer) -> None:
    async def story() -> None:
        async with open_nats(own_place(own_server)) as journal:
            own_server.freeze()
            journal._log._is_owner = True  # It need not ask where it is, and sends at once.
            for _ in range(2):
                with pytest.raises(JournalUnavailable):
                    await journal.append([batch(bytes(7_000_000)) for _ in range(2)])
            begun = monotonic()
        assert monotonic() - begun < 5

    run(story())


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_nothing_that_was_acknowledged_is_lost_when_the_server_dies(own_server: NatsServer, end: str) -> None:
    async def story() -> None:
        async with open_nats(own_place(own_server)) as journal:
            kept: dict[int, Batch] = {}
            sent: list[Batch] = []

            async def write() -> None:
                while True:
                    batches = [batch(os.urandom(2_000), number + 1) for number in range(3)]
                    sent.extend(batches)
                    kept.update(zip(await journal.append(batches), batches, strict=True))

            writing = asyncio.create_task(write())
            await until(lambda: enough(kept, 60))
            getattr(own_server, end)()
            with pytest.raises(JournalUnavailable):
                await writing
            for call in (journal.append(sent[-3:]), journal.documents("b")):
                with pytest.raises(JournalUnavailable):
                    await call

            own_server.start()
            await until(lambda: works(journal))
            kept.update(zip(await journal.append(sent[-3:]), sent[-3:], strict=True))
            found = {one.first: one for one in await read_all(journal)}
            check_contiguous(found.values())
            assert all((found[first].data, found[first].count) == one[:2] for first, one in kept.items())
            of_ours = [one.data for one in found.values() if one.data != b"data"]
            assert sorted(of_ours) == sorted(one.data for one in sent)

    run(story())


async def enough(kept: dict[int, Batch], count: int) -> bool:
    return len(kept) >= count


def test_what_waits_for_an_answer_fails_as_soon_as_the_connection_does(own_server: NatsServer) -> None:
    async def story() -> None:
        async with open_nats((own_server.url.replace("timeout=2", "timeout=60"), "orders")) as journal:
            own_server.freeze()
            waiting = asyncio.create_task(journal.documents("b"))
            await until(lambda: enough(journal._line._waiting, 1))

            own_server.kill()

            with pytest.raises(JournalUnavailable, match="cannot be reached"):
                await asyncio.wait_for(waiting, 30)

    run(story())


def test_a_call_waits_a_little_for_a_server_that_restarts(
    own_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with open_nats((own_server.url.replace("timeout=2", "timeout=60"), "orders")) as journal:
            await journal.append([batch()])
            own_server.kill()
            await until(lambda: is_lost(journal))
            waiting = asyncio.create_task(journal.append([batch()]))
            own_server.start()

            assert await waiting == [1]

    with caplog.at_level(logging.WARNING, "raydispatch"):
        run(story())

    assert [record.message for record in caplog.records] == ["journal disconnected", "journal connected again"]


async def is_lost(journal: Any) -> bool:
    return not journal._line._mended.is_set()


def test_a_server_that_hangs_up_for_good_is_called_again(nats_server: NatsServer) -> None:
    async def story() -> None:
        async with open_nats((nats_server.url, "hung-up")) as journal:
            await journal.append([batch()])
            first = journal._line._client
            await first.publish("x" * 5_000, b"")  # A line too long, at which servers hang up.
            await until(lambda: is_lost(journal))

            await until(lambda: works(journal))
            assert first.is_closed
            assert journal._line._client is not first

    run(story())


def test_nobody_is_there_at_all() -> None:
    async def story() -> None:
        begun = monotonic()
        with pytest.raises(JournalUnavailable, match=r"The journal 'orders' at nats://127.0.0.1:\d+ cannot be reached"):
            async with open_nats((f"nats://127.0.0.1:{free_port()}?timeout=0.5", "orders")):
                pass
        assert monotonic() - begun < 5

    run(story())


def test_one_server_of_several_is_enough(nats_server: NatsServer) -> None:
    async def story() -> None:
        place = (nats_server.url.replace("nats://", f"nats://127.0.0.1:{free_port()},"), "one-of-two")
        async with open_nats(place) as journal:
            assert await journal.head() == 0

    run(story())


# Letters


def line_to(server: NatsServer) -> Line:
    return Line(NatsAddress.parse(server.url, "orders"))


def test_answers_come_in_the_order_of_the_letters(nats_server: NatsServer) -> None:
    async def story() -> None:
        line = line_to(nats_server)
        client = await line._dialled()
        held: list[Any] = []

        async def answer_backwards(message: Any) -> None:
            held.append(message)
            if len(held) == 3:
                for one in reversed(held):
                    await one.respond(one.data)

        await client.subscribe("backwards", cb=answer_backwards)
        answers = await line.ask_all([Letter("backwards", data) for data in (b"1", b"2", b"3")])

        assert [answer.data for answer in answers] == [b"1", b"2", b"3"]
        assert line._waiting == {}
        await line.close()

    run(story())


def test_of_a_server_that_knows_no_batches_one_answer_is_all(nats_server: NatsServer) -> None:
    async def story() -> None:
        line = line_to(nats_server)
        client = await line._dialled()

        async def answer_once(message: Any) -> None:
            await client.publish(message.reply, b"one", headers={"Nats-Sequence": "7"})

        await client.subscribe("old-server", cb=answer_once)
        (answer,) = await line.ask_for_many(Letter("old-server"))

        assert answer.data == b"one"
        await line.close()

    run(story())


def test_where_nobody_listens_it_is_said_at_once(nats_server: NatsServer) -> None:
    async def story() -> None:
        line = line_to(nats_server)
        for call in (line.ask(Letter("nobody")), line.ask_all([Letter("nobody")]), line.ask_for_many(Letter("nobody"))):
            with pytest.raises(NobodyListens, match="JetStream does not answer at nats://127"):
                await call
        await line.close()

    run(story())


@pytest.mark.parametrize("size", [8 * 1024 * 1024 - 150, 9_000_000])
def test_what_is_too_large_for_the_server_is_refused_before_anything_is_sent(nats_place: Place, size: int) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            for call in (journal.append([batch(), batch(bytes(size))]), journal.append([batch(bytes(size))])):
                with pytest.raises(InvalidParameter, match=r"its max_payload is 8,388,608"):
                    await call

            assert await journal.append([batch(bytes(8_380_000))]) == [0]

    run(story())


def test_a_document_that_is_too_large_for_the_server_is_refused(nats_place: Place) -> None:
    async def story() -> None:
        async with open_nats(nats_place) as journal:
            with pytest.raises(InvalidParameter, match=r"A batch or document of 9,000,000 bytes is larger"):
                await journal.write([Change("b", "a", b"1"), Change("b", "b", bytes(9_000_000))])

            assert await journal.documents("b") == []

    run(story())


def test_a_line_that_was_closed_is_not_opened_again(nats_server: NatsServer) -> None:
    async def story() -> None:
        line = line_to(nats_server)
        await line.close()

        with pytest.raises(InvalidState, match="The journal 'orders' is closed"):
            await line.api("INFO")

    run(story())


@pytest.mark.parametrize(
    ("sizes", "most", "counts"),
    [
        ([], 2, []),
        ([1, 1, 1, 1, 1], 2, [2, 2, 1]),
        ([IN_FLIGHT_BYTES + 1, 1], 2, [1, 1]),
        ([IN_FLIGHT_BYTES - 1, 1, 1], 9, [2, 1]),
    ],
)
def test_letters_go_in_portions(sizes: list[int], most: int, counts: list[int]) -> None:
    letters = [Letter("a", bytes(size)) for size in sizes]

    found = list(portions(letters, most))

    assert [len(portion) for portion in found] == counts
    assert [letter for portion in found for letter in portion] == letters
