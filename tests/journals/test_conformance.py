"""What both journals promise."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.journals.helping import Model, Place, batch, check_contiguous, opened, read_all, run

from raydispatch.delivery.journal import Change, Journal, Stored
from raydispatch.errors import InvalidParameter, InvalidState

# The log


def test_a_new_journal_is_empty(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            assert (await journal.head(), await journal.first(), await journal.read(0)) == (0, 0, [])
            assert await journal.documents("cursors") == []
            assert await journal.offset_at(0) == 0
            await journal.trim(10)
            assert await journal.append([]) == []

    run(story())


def test_messages_are_numbered_without_gaps(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            before = time()

            firsts = await journal.append([batch(b"a", 3), batch(b"", 1)]) + await journal.append([batch(b"c", 100)])

            found = await journal.read(0)
            assert firsts == [0, 3, 4]
            assert await journal.head() == 104
            assert [(one.first, one.count, one.data) for one in found] == [(0, 3, b"a"), (3, 1, b""), (4, 100, b"c")]
            assert all(before <= one.at <= time() for one in found)

    run(story())


@pytest.mark.parametrize(("offset", "first"), [(0, 0), (1, 0), (9, 0), (10, 10), (14, 10), (15, 15), (-5, 0)])
def test_reading_begins_with_the_batch_that_has_the_offset(place: Place, offset: int, first: int) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(count=10), batch(count=5), batch(count=1)])

            found = await journal.read(offset)

            assert found[0].first == first
            check_contiguous(found)
            assert found[-1].first == 15

    run(story())


@pytest.mark.parametrize("offset", [16, 17, 1_000_000])
def test_at_the_head_there_is_nothing(place: Place, offset: int) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(count=16)])

            assert await journal.read(offset) == []

    run(story())


@pytest.mark.parametrize(("most_bytes", "most"), [(1, 1), (100_000, 1), (250_000, 2), (310_000, 3), (999_999, 4)])
def test_a_page_is_no_larger_than_wanted_or_one_batch(place: Place, most_bytes: int, most: int) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(bytes(100_000)) for _ in range(4)])

            assert len(await journal.read(0, most_bytes)) == most

    run(story())


def test_large_batches_come_back_as_they_were(place: Place) -> None:
    async def story() -> None:
        data = [os.urandom(size) for size in (5_000_000, 1, 7_000_000)]
        async with opened(place) as journal:
            await journal.append([batch(one) for one in data])

            assert [one.data for one in await read_all(journal)] == data

    run(story())


def test_what_was_appended_is_there_when_it_is_opened_again(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(b"a", 2)], [Change("cursors", "billing", b"1")])
            before = await journal.read(0)
        async with opened(place) as journal:
            assert await journal.read(0) == before
            assert await journal.documents("cursors") == [("billing", b"1")]
            assert await journal.append([batch(b"b")]) == [2]

    run(story())


def test_times_never_go_back_when_the_clock_does(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "sqlite_file" if place[0].startswith("sqlite") else "nats_log"

    async def story() -> None:
        async with opened(place) as journal:
            for now in (1_000.5, 500.0, 2_000.0):
                monkeypatch.setattr(f"raydispatch.journals.{module}.time", lambda now=now: now)
                await journal.append([batch()])

            assert [one.at for one in await journal.read(0)] == [1_000.5, 1_000.5, 2_000.0]

    run(story())


def test_the_first_message_since_a_time_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "sqlite_file" if place[0].startswith("sqlite") else "nats_log"

    async def append(journal: Journal) -> None:
        for second in range(100):
            monkeypatch.setattr(f"raydispatch.journals.{module}.time", lambda second=second: second // 2 * 2.0)
            await journal.append([batch(count=10)])

    async def story() -> None:
        async with opened(place) as journal:
            await append(journal)
        # Opened again, so that nothing is known of what is where.
        async with opened(place) as journal:
            found = [await journal.offset_at(at) for at in (-1.0, 0.0, 0.5, 2.0, 49.0, 97.9, 98.0, 98.1)]

            assert found == [0, 0, 20, 20, 500, 980, 980, 1_000]

    run(story())


def test_any_offset_is_found_after_opening(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(str(number).encode(), number % 7 + 1) for number in range(200)])
            stored = await read_all(journal)
        async with opened(place) as journal:
            for one in reversed(stored):
                assert (await journal.read(one.first + one.count - 1, 1))[0] == one

    run(story())


def test_many_tasks_append_at_the_same_time(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:

            async def append(number: int) -> list[tuple[int, bytes]]:
                batches = [batch(f"{number}.{part}".encode(), number % 5 + 1) for part in range(3)]
                return list(zip(await journal.append(batches), [one.data for one in batches], strict=True))

            told = await asyncio.gather(*(append(number) for number in range(40)))

            found = await read_all(journal, most_bytes=50)
            check_contiguous(found)
            assert sorted(pair for pairs in told for pair in pairs) == [(one.first, one.data) for one in found]
            for pairs in told:
                assert all(earlier[0] < later[0] for earlier, later in pairwise(pairs))

    run(story())


def test_reading_goes_on_while_others_append_and_trim(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:

            async def write() -> None:
                for number in range(60):
                    await journal.append([batch(str(number).encode())])
                    if number % 10 == 9:
                        await journal.trim(number - 5)

            writing = asyncio.create_task(write())
            found: list[Stored] = []
            while not found or found[-1].first < 59:
                page = await journal.read(found[-1].first + 1 if found else 0, 5)
                check_contiguous(page)
                found += page
                await asyncio.sleep(0)
            await writing

            numbers = [one.first for one in found]
            assert numbers == sorted(set(numbers))
            assert all(one.data == str(one.first).encode() for one in found)

    run(story())


# Letting go


@pytest.mark.parametrize(
    ("before", "first"), [(-1, 0), (0, 0), (9, 0), (10, 10), (12, 10), (15, 15), (16, 16), (10_000, 16)]
)
def test_only_batches_that_are_wholly_older_go(place: Place, before: int, first: int) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch(count=10), batch(count=5), batch(count=1)])

            await journal.trim(before)

            assert (await journal.first(), await journal.head()) == (first, 16)
            assert [one.first for one in await journal.read(0)] == [one for one in (0, 10, 15) if one >= first]
        async with opened(place) as journal:
            assert (await journal.first(), await journal.head()) == (first, 16)

    run(story())


def test_the_head_never_goes_back_even_if_nothing_is_kept(place: Place) -> None:
    async def story() -> None:
        for life in range(3):
            async with opened(place) as journal:
                assert await journal.append([batch(count=5)]) == [life * 5]
                await journal.trim(life * 5 + 5)
                await journal.trim(life * 5 + 5)
                assert (await journal.first(), await journal.read(0)) == (life * 5 + 5, [])
                assert await journal.offset_at(0) == life * 5 + 5

    run(story())


def test_trimming_many_batches_lets_go_of_all(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch() for _ in range(1_001)])

            await journal.trim(1_000)

            assert [one.first for one in await journal.read(0)] == [1_000]

    run(story())


# Documents


def test_documents_are_written_replaced_and_deleted(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.write([Change("cursors", "a", b"1"), Change("cursors", "b", b""), Change("dead", "a", b"3")])
            await journal.append(
                [], [Change("cursors", "a", b"4"), Change("dead", "a", None), Change("dead", "x", None)]
            )

            assert await journal.documents("cursors") == [("a", b"4"), ("b", b"")]
            assert await journal.documents("dead") == []

    run(story())


def test_of_changes_to_one_document_the_last_counts(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.write([Change("b", "a", b"1"), Change("b", "a", None), Change("b", "c", None)])
            await journal.write([Change("b", "d", b"1"), Change("b", "d", b"2"), Change("b", "c", b"3")])

            assert await journal.documents("b") == [("c", b"3"), ("d", b"2")]

    run(story())


STRANGE = [
    "a",
    "A",
    "a b",
    "a.b",
    "a*",
    ">",
    "=",
    "=2E",
    "%41",
    "~",
    "..",
    "\0",
    "\n",
    "é",
    "ß",
    "日本",
    "😀",
    "z" * 200,
]


def test_buckets_and_keys_may_be_any_text(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.write(
                [Change(bucket, key, f"{bucket}/{key}".encode()) for bucket in STRANGE for key in STRANGE]
            )

            for bucket in STRANGE:
                found = await journal.documents(bucket)
                assert found == [(key, f"{bucket}/{key}".encode()) for key in sorted(STRANGE)]

    run(story())


def test_documents_come_in_pages_by_key(place: Place) -> None:
    async def story() -> None:
        keys = [f"{number:03}" for number in range(25)]
        async with opened(place) as journal:
            await journal.write([Change("b", key, key.encode()) for key in reversed(keys)])
            pages, after = [], ""
            while page := await journal.documents("b", after, 10):
                pages.append([key for key, _ in page])
                after = page[-1][0]

            assert pages == [keys[:10], keys[10:20], keys[20:]]
            assert await journal.documents("b", "0115", 1) == [("012", b"012")]
            assert await journal.documents("b", "", 0) == []

    run(story())


def test_what_is_written_between_two_pages_is_in_the_next(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.write([Change("b", key, b"1") for key in "acegi"])
            first = await journal.documents("b", "", 2)
            await journal.write([Change("b", "d", b"2"), Change("b", "e", None), Change("b", "a", None)])

            assert first == [("a", b"1"), ("c", b"1")]
            assert await journal.documents("b", "c", 2) == [("d", b"2"), ("g", b"1")]

    run(story())


# What is refused


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_messages(place: Place, size: int) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            with pytest.raises(InvalidParameter, match=f"The batch one has {size} messages"):
                await journal.append([batch(), batch(count=size, batch_id="one")])

            assert await journal.head() == 0

    run(story())


@pytest.mark.parametrize(
    ("change", "words"),
    [(Change("b", "", b"1"), "of the bucket 'b' has no key"), (Change("b", "\ud800", b"1"), "is no valid text")],
)
def test_keys_that_cannot_be_stored_are_refused(place: Place, change: Change, words: str) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            for call in (journal.write([change]), journal.append([batch()], [change])):
                with pytest.raises(InvalidParameter, match=words):
                    await call

            assert await journal.head() == 0

    run(story())


def test_a_closed_journal_says_so(place: Place) -> None:
    async def story() -> None:
        async with opened(place) as journal:
            await journal.append([batch()])
        await journal.close()

        for call in (journal.append([batch()]), journal.documents("b")):
            with pytest.raises(InvalidState, match="is closed"):
                await call

    run(story())


# As a whole

DATA = st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 300), st.integers(0, 255))
BATCH = st.builds(batch, DATA, st.integers(1, 9))
CHANGE = st.builds(Change, st.sampled_from("xy"), st.sampled_from([*"abcd", "é.", "😀"]), st.none() | DATA)
OFFSET = st.integers(-1, 60)
STEPS = st.one_of(
    st.tuples(st.just("append"), st.lists(BATCH, max_size=4), st.lists(CHANGE, max_size=3)),
    st.tuples(st.just("read"), OFFSET, st.integers(1, 700)),
    st.tuples(st.just("trim"), OFFSET),
    st.tuples(st.just("write"), st.lists(CHANGE, max_size=4)),
    st.tuples(st.just("documents"), st.sampled_from("xy"), st.sampled_from(["", *"abcd"]), st.integers(1, 4)),
    st.tuples(st.just("reopen")),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=15))
def test_a_journal_does_what_a_list_and_a_dict_do(new_place: Callable[[], Place], steps: list[tuple[Any, ...]]) -> None:
    async def story() -> None:
        place, model = new_place(), Model()
        steps.append(("reopen",))
        while steps:
            async with opened(place) as journal:
                while steps and (step := steps.pop(0))[0] != "reopen":
                    await same(journal, model, *step)
                assert (await journal.head(), await journal.first()) == (model.head, model.first())
                found = [(one.first, one.count, one.data) for one in await read_all(journal)]
                assert found == model.kept

    run(story())


async def same(journal: Journal, model: Model, verb: str, *arguments: Any) -> None:
    """Both do it, and come to the same."""
    found, wanted = await getattr(journal, verb)(*arguments), getattr(model, verb)(*arguments)
    if verb == "read":
        # A server counts what it adds to each batch: its pages may be smaller than they could.
        wanted = wanted[: max(1, len(found))]
        found = [(one.first, one.count, one.data) for one in found]
    assert found == wanted, (verb, arguments)


# Death

CHILD = """
import asyncio, sys
from raydispatch.delivery.journal import Batch, Change, open_journal

async def main():
    journal = await open_journal(sys.argv[1], sys.argv[2])
    number = 0
    while True:
        batches = [Batch(str(number + part).encode() * 5_000, 1, f"{number + part}") for part in range(3)]
        await journal.append(batches, [Change("last", "number", str(number + 2).encode())])
        number += 3
        print(number, flush=True)

asyncio.run(main())
"""


def test_what_was_acknowledged_survives_the_death_of_the_process(place: Place, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, *place], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(40)]
        child.kill()
        acknowledged += map(int, child.stdout.readlines())

    async def story() -> None:
        async with opened(place) as journal:
            found = await read_all(journal)
            ((_, last),) = await journal.documents("last")

            assert len(found) >= acknowledged[-1]
            assert [one.data for one in found] == [str(number).encode() * 5_000 for number in range(len(found))]
            assert int(last) >= acknowledged[-1] - 1
            assert await journal.append([batch()]) == [len(found)]

    run(story())
