import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID, uuid4

import msgpack
import pytest
from tests.delivery.fakes import MemoryJournal

from raydispatch.delivery.memories import BUCKET, Memories, packed_note, unpacked_note
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply

NOTES = [bytes([number]) for number in range(100)]


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


class Life:
    """Memories over a journal that may have been there before."""

    def __init__(self, journal: MemoryJournal | None = None, capacity: int = 1_000) -> None:
        self.journal = journal or MemoryJournal()
        self.memories = Memories(self.journal, capacity)

    async def open(self) -> "Life":
        await self.memories.open()
        return self

    async def again(self, capacity: int = 1_000) -> "Life":
        """The next one, on the same journal."""
        return await Life(self.journal, capacity).open()

    async def write(self, dispatcher_id: str, *notes: bytes) -> None:
        self.memories.note(dispatcher_id, notes)
        await self.flush()

    async def flush(self) -> None:
        """As the post does from time to time."""
        changes = self.memories.changes()
        await self.journal.write(changes)
        self.memories.written(changes)

    @property
    def keys(self) -> list[str]:
        return sorted(self.journal.buckets.get(BUCKET, {}))


# Keeping


def test_notes_are_recalled_in_the_order_of_their_coming() -> None:
    async def story() -> None:
        life = await Life().open()

        await life.write("a", *NOTES[:3])
        await life.write("a", *NOTES[3:5])
        life.memories.note("a", NOTES[5:7])

        assert await life.memories.recall("a") == NOTES[:7]

    run(story())


def test_notes_survive_in_the_journal() -> None:
    async def story() -> None:
        life = await Life().open()
        await life.write("a", *NOTES[:3])

        second = await life.again()
        await second.write("a", *NOTES[3:5])
        third = await life.again()

        assert await third.memories.recall("a") == NOTES[:5]
        assert len(set(third.keys)) == 2

    run(story())


def test_dispatchers_do_not_know_each_others_notes() -> None:
    async def story() -> None:
        life = await Life().open()

        life.memories.note("a", NOTES[:1])
        life.memories.note("a/b", NOTES[1:2])
        await life.write("b", *NOTES[2:3])
        again = await life.again()

        assert [await again.memories.recall(name) for name in ("a", "a/b", "b", "z")] == [
            [note] for note in NOTES[:3]
        ] + [[]]

    run(story())


def test_nothing_new_is_nothing_to_write() -> None:
    async def story() -> None:
        life = await Life().open()
        first = life.memories.changes()
        life.memories.note("a", NOTES[:1])

        assert (first, len(life.memories.changes()), life.memories.changes()) == ([], 1, [])

    run(story())


def test_all_dispatchers_are_written_together_a_piece_each() -> None:
    async def story() -> None:
        life = await Life().open()
        life.memories.note("a", NOTES[:1])
        life.memories.note("b", NOTES[1:2])
        life.memories.note("a", NOTES[2:3])

        changes = life.memories.changes()

        assert [(one.bucket, one.key.partition("/")[0]) for one in changes] == [(BUCKET, "a"), (BUCKET, "b")]
        assert [msgpack.unpackb(one.value or b"") for one in changes] == [[NOTES[0], NOTES[2]], [NOTES[1]]]

    run(story())


def test_the_oldest_pieces_go_when_the_others_are_enough() -> None:
    async def story() -> None:
        life = await Life(capacity=5).open()

        for start in range(0, 30, 3):
            await life.write("a", *NOTES[start : start + 3])

        # Never less than its capacity, and less than a piece more.
        assert await life.memories.recall("a") == NOTES[24:30]
        assert len(life.keys) == 2

    run(story())


def test_a_piece_that_is_larger_than_all_is_kept_whole() -> None:
    async def story() -> None:
        life = await Life(capacity=5).open()

        await life.write("a", *NOTES[:3])
        await life.write("a", *NOTES[3:50])

        assert await life.memories.recall("a") == NOTES[3:50]

    run(story())


def test_one_dispatcher_costs_another_no_memory() -> None:
    async def story() -> None:
        life = await Life(capacity=2).open()
        await life.write("quiet", NOTES[0])

        for note in NOTES[1:20]:
            await life.write("busy", note)

        assert await life.memories.recall("quiet") == NOTES[:1]
        assert await life.memories.recall("busy") == NOTES[18:20]

    run(story())


def test_a_smaller_capacity_counts_from_the_next_note_on() -> None:
    async def story() -> None:
        life = await Life().open()
        for note in NOTES[:10]:
            await life.write("a", note)

        again = await life.again(capacity=3)
        await again.write("a", NOTES[10])

        assert await again.memories.recall("a") == NOTES[8:11]

    run(story())


def test_more_pieces_than_a_page_are_all_found() -> None:
    async def story() -> None:
        life = await Life(capacity=100_000).open()
        for number in range(250):
            life.memories.note("a", [b"%d" % number])
            life.memories.note("b", [b"other"])
            await life.flush()

        again = await life.again(100_000)

        assert await again.memories.recall("a") == [b"%d" % number for number in range(250)]

    run(story())


def test_notes_that_are_being_written_are_recalled_once() -> None:
    async def story() -> None:
        life = await Life().open()
        await life.write("a", NOTES[0])
        life.memories.note("a", NOTES[1:3])

        changes = life.memories.changes()
        life.memories.note("a", NOTES[3:4])
        before = await life.memories.recall("a")
        await life.journal.write(changes)
        during = await life.memories.recall("a")
        life.memories.written(changes)

        assert before == during == await life.memories.recall("a") == NOTES[:4]

    run(story())


# Notes


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("a", DispatchStatus.SUCCESS),
        Outcome("a", DispatchStatus.SUCCESS, outputs=("dev.x.events.v1", "dev.y.events.v1"), attempts=3),
        Outcome("a", DispatchStatus.PUBLISH_FAILED, attempts=1, duration_ms=12.5),
        Outcome("a", DispatchStatus.SUCCESS, reply=Reply({"balance": 12, 7: [None, True, 1.5, b"x"]})),
        Outcome("a", DispatchStatus.SUCCESS, reply=Reply(None)),
    ],
)
def test_an_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    message_id = uuid4()

    assert unpacked_note(packed_note(message_id, outcome), "a") == (message_id, outcome)


@pytest.mark.parametrize("number", [0, 1, 2**128 - 1])
def test_every_message_id_fits(number: int) -> None:
    message_id = UUID(int=number)

    found, _ = unpacked_note(packed_note(message_id, Outcome("a", DispatchStatus.SUCCESS)), "a")

    assert found == message_id


@pytest.mark.parametrize("payload", [object(), {"at": {1, 2}}, 2**70, "\ud800"])
def test_a_reply_that_is_no_data_is_left_out(payload: object) -> None:
    outcome = Outcome("a", DispatchStatus.SUCCESS, outputs=("dev.x.events.v1",), reply=Reply(payload))

    _, found = unpacked_note(packed_note(uuid4(), outcome), "a")

    assert found == outcome._replace(reply=None)
