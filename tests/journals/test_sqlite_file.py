"""What a file keeps when it is damaged, or when there is no room."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.journals.helping import Place, batch, file_of, fill_file, open_closed, opened, read_all, run

from raydispatch.delivery.journal import Change, Journal
from raydispatch.errors import JournalCorrupt, JournalUnavailable

# Damage


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(100_000))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.unlink()
    subprocess.run(
        [sys.executable, "-c", f"import sqlite3; sqlite3.connect({str(path)!r}).execute('create table t(a)')"]
    )


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def headless(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(30_000))


@pytest.mark.parametrize("harm", [garbage, emptied, foreign, truncated, headless])
def test_a_file_that_is_no_journal_says_what_to_do(file_place: Place, harm: Callable[[Path], None]) -> None:
    fill_file(file_place)
    harm(file_of(file_place))

    with pytest.raises(JournalCorrupt, match=rf"{file_of(file_place)} .*[Rr]estore it from a backup"):
        run(open_closed(file_place))


def test_another_format_is_refused(file_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr("raydispatch.journals.sqlite_making.FORMAT", "2")
        future.setattr("raydispatch.journals.sqlite_file.FORMAT", "2")
        fill_file(file_place)

    with pytest.raises(JournalCorrupt, match=r"has format 2, and this version of raydispatch reads 1"):
        run(open_closed(file_place))


def test_a_damaged_batch_is_found_and_others_can_be_read(file_place: Place) -> None:
    data = fill_file(file_place)
    flip(file_of(file_place), data[7][20_000:20_020])

    async def story() -> None:
        async with opened(file_place) as journal:
            with pytest.raises(JournalCorrupt, match=r"The batch at offset 7 in .* is damaged"):
                await read_all(journal)
            assert [one.data for one in await read_all(journal, 8)] == data[8:]

    run(story())


def test_a_damaged_document_is_found(file_place: Place) -> None:
    fill_file(file_place)
    flip(file_of(file_place), b"here-it-is")

    async def story() -> None:
        async with opened(file_place) as journal:
            with pytest.raises(JournalCorrupt, match=r"The document 'key' of 'b' in .* is damaged"):
                await journal.documents("b")

    run(story())


def test_a_batch_that_is_missing_is_found(file_place: Place) -> None:
    fill_file(file_place)
    statement = "DELETE FROM log WHERE first = 7"
    program = (
        f"import sqlite3; db = sqlite3.connect({str(file_of(file_place))!r}); db.execute({statement!r}); db.commit()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

    async def story() -> None:
        async with opened(file_place) as journal:
            for offset in (0, 7):
                with pytest.raises(JournalCorrupt, match=r"The batch at offset 8 in .* is damaged or missing"):
                    await read_all(journal, offset)

    run(story())


def flip(path: Path, found: bytes) -> None:
    """Change a byte where this is."""
    content = path.read_bytes()
    place = content.index(found)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))


# Room


def test_the_room_of_what_was_trimmed_is_used_again(file_place: Place) -> None:
    async def story() -> None:
        async with opened(file_place) as journal:
            for number in range(60):
                await journal.append([batch(os.urandom(200_000))])
                await journal.trim(number - 3)

    run(story())

    assert file_of(file_place).stat().st_size < 3_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_nothing_of_the_call_and_all_of_the_rest(small_disk: Path) -> None:
    place = (f"sqlite://{small_disk}/orders.db", "orders")

    async def story() -> None:
        async with opened(place) as journal:
            kept = await until_full(journal)

            assert await journal.head() == len(kept)
            assert [one.data for one in await read_all(journal)] == kept
            assert len(await journal.documents("b")) == len(kept)
            await journal.trim(len(kept))
            assert await journal.append([batch(os.urandom(100_000))]) == [len(kept)]
        async with opened(place) as journal:
            assert (await journal.first(), await journal.head()) == (len(kept), len(kept) + 1)

    run(story())


def test_a_file_that_may_not_grow_keeps_nothing_of_the_call_and_all_of_the_rest(file_place: Place) -> None:
    async def story() -> None:
        async with opened(file_place) as journal:
            with files_up_to(2_000_000):
                kept = await until_full(journal)
            assert [one.data for one in await read_all(journal)] == kept
            assert await journal.append([batch(os.urandom(100_000))]) == [len(kept)]
        async with opened(file_place) as journal:
            assert await journal.head() == len(kept) + 1

    run(story())


async def until_full(journal: Journal) -> list[bytes]:
    """What was kept; of the last two batches and documents, none may have been."""
    kept: list[bytes] = []

    async def append() -> None:
        while len(kept) < 1_000:
            data = os.urandom(100_000)
            changes = [Change("b", f"{len(kept)}", data), Change("b", f"{len(kept)}+", b"")]
            await journal.append([batch(data), batch(data)], changes)
            kept.extend([data, data])

    with pytest.raises(JournalUnavailable, match="of this was kept"):
        await append()
    return kept


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
