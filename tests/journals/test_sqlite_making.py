"""How the file of a journal comes into being."""

import asyncio
import os

import pytest
from tests.journals.helping import Place, batch, file_of, fill_file, open_closed, opened, run

from raydispatch.delivery.journal import open_journal
from raydispatch.errors import JournalUnavailable
from raydispatch.journals import sqlite_making


def test_only_its_owner_can_read_it(file_place: Place) -> None:
    async def story() -> None:
        async with opened(file_place) as journal:
            await journal.append([batch()])
            modes = {path.name: path.stat().st_mode & 0o777 for path in file_of(file_place).parent.iterdir()}

            assert len(modes) == 2
            assert set(modes.values()) == {0o600}

    before = os.umask(0)
    try:
        run(story())
    finally:
        os.umask(before)


def test_a_file_that_came_from_a_backup_is_closed_to_others(file_place: Place) -> None:
    fill_file(file_place)
    file_of(file_place).chmod(0o644)

    run(open_closed(file_place))

    assert file_of(file_place).stat().st_mode & 0o777 == 0o600


def test_a_closed_journal_is_one_file(file_place: Place) -> None:
    fill_file(file_place)

    assert list(file_of(file_place).parent.iterdir()) == [file_of(file_place)]


def test_of_two_that_make_the_file_at_the_same_time_one_has_it(file_place: Place) -> None:
    async def story() -> None:
        found = await asyncio.gather(*(open_journal(*file_place) for _ in range(4)), return_exceptions=True)

        journals = [one for one in found if not isinstance(one, BaseException)]
        assert len(journals) == 1
        assert all(isinstance(one, JournalUnavailable) for one in found if one not in journals)
        await journals[0].close()

    run(story())


def test_a_crash_while_it_is_made_leaves_no_half_of_one(file_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as death:
        death.setattr(sqlite_making.os, "link", crash)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            sqlite_making.make(file_of(file_place), "orders")
    assert list(file_of(file_place).parent.iterdir()) == []

    run(open_closed(file_place))


def test_a_file_that_is_there_is_not_made_again(file_place: Place) -> None:
    data = fill_file(file_place)

    sqlite_making.make(file_of(file_place), "orders")

    async def story() -> None:
        async with opened(file_place) as journal:
            assert await journal.head() == len(data)

    run(story())
