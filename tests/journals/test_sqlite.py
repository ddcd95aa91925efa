"""What is special about a journal in one file."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.journals.helping import Place, batch, file_of, fill_file, open_closed, opened, run

from raydispatch.delivery.journal import open_journal
from raydispatch.errors import InvalidParameter, JournalUnavailable

# Its address


def test_a_relative_path_is_of_where_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def story() -> None:
        journal = await open_journal("sqlite:some%20orders.db", "orders")
        monkeypatch.chdir("/")
        await journal.append([batch()])
        await journal.close()

    run(story())

    assert [path.name for path in tmp_path.iterdir()] == ["some orders.db"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://orders.db", "sqlite:///path/to/file.db"),
        ("sqlite:", "sqlite:///path/to/file.db"),
        ("sqlite:///", "sqlite:///path/to/file.db"),
        ("sqlite:///orders.db?sync=full", "no option 'sync'"),
        ("sqlite:///orders.db?synchronous=off", "synchronous is one of full, normal; not 'off'"),
        ("sqlite:///no/such/place/orders.db", "There is no directory /no/such/place"),
    ],
)
def test_an_address_that_cannot_be_is_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        run(open_closed((url, "orders")))


def test_a_directory_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="is a directory"):
        run(open_closed((f"sqlite://{tmp_path}", "orders")))


@pytest.mark.parametrize("synchronous", ["full", "normal", "NORMAL"])
def test_it_may_wait_for_the_disk_or_not(file_place: Place, synchronous: str) -> None:
    url, name = file_place

    async def story() -> None:
        async with opened((f"{url}?synchronous={synchronous}", name)) as journal:
            assert await journal.append([batch()]) == [0]

    run(story())


# One owner


def test_a_second_opener_is_told_who_is_in_the_way(file_place: Place) -> None:
    async def story() -> None:
        async with opened(file_place) as journal:
            with pytest.raises(JournalUnavailable, match=f"{file_of(file_place)} is in use by another process"):
                await open_journal(*file_place)

            assert await journal.append([batch()]) == [0]

    run(story())


def test_a_second_process_is_told_so_even_after_a_second_opener_in_the_first(file_place: Place) -> None:
    program = (
        "import asyncio, sys; from raydispatch.delivery.journal import open_journal as o; asyncio.run(o(*sys.argv[1:]))"
    )

    async def story() -> None:
        async with opened(file_place):
            with pytest.raises(JournalUnavailable):
                await open_journal(*file_place)

            other = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, *file_place, stderr=asyncio.subprocess.PIPE
            )
            _, said = await other.communicate()

            assert b"JournalUnavailable" in said
            assert b"in use by another process" in said

    run(story())


def test_a_journal_of_another_name_is_refused(file_place: Place) -> None:
    fill_file(file_place)

    with pytest.raises(InvalidParameter, match="holds the journal 'orders', not 'billing'"):
        run(open_closed((file_place[0], "billing")))


def test_an_opening_that_is_given_up_leaves_the_file_to_others(file_place: Place) -> None:
    async def story() -> None:
        opening = asyncio.create_task(open_journal(*file_place))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])

        # The thread may still be closing: SQLite waits for that.
        async with opened(file_place) as journal:
            assert await journal.head() == 0

    run(story())
