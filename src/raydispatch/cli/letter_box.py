"""Where dead letters are: with a system that runs, or in a journal that nobody uses now."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from raydispatch.cli.system import attach
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.journal import Journal, open_journal
from raydispatch.delivery.letters import LetterFilter, Letters, pack_letter
from raydispatch.delivery.log import Log
from raydispatch.delivery.post import CURSORS
from raydispatch.dispatch.clock import SystemClock
from raydispatch.errors import InvalidParameter, InvalidState, JournalUnavailable
from raydispatch.settings import JournalSettings

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem

T = TypeVar("T")


class LetterBox(Protocol):
    """Dead letters, wherever they are."""

    warning: str | None
    """What one should know before sending letters again."""

    def find(self, wanted: LetterFilter) -> list[DeadLetter]:
        """Those that are meant."""

    def redrivable(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """Those of them that can be sent again; raises if none ever can."""

    def purgeable(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """Those of them that can be let go of; raises if none ever can."""

    def redrive(self, wanted: LetterFilter) -> int:
        """Send them again; how many."""

    def purge(self, wanted: LetterFilter) -> int:
        """Let go of them; how many."""


@contextmanager
def letter_box(name: str, journal: str | None) -> Iterator[LetterBox]:
    """The letters of a journal, if one is named; else those of the system of this name."""
    if journal is not None:
        yield JournalBox(journal, name)
        return
    with attach(name) as system:
        yield SystemBox(name, system)


class SystemBox:
    """The letters of a system that runs."""

    warning: str | None = None

    def __init__(self, name: str, system: "DispatchSystem") -> None:
        self._name = name
        self._system = system

    def find(self, wanted: LetterFilter) -> list[DeadLetter]:
        """Those in its journal, and those in its memory."""
        return self._system.dead_letters(**wanted._asdict())

    def redrivable(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """Those in the journal; in memory are others, whose payload is no data."""
        self._check_journal()
        return [letter for letter in letters if _is_data(letter)]

    purgeable = redrivable

    def redrive(self, wanted: LetterFilter) -> int:
        """Each to the dispatcher that failed, now."""
        return self._system.redrive(**wanted._asdict())

    def purge(self, wanted: LetterFilter) -> int:
        """For good."""
        return self._system.purge_dead_letters(**wanted._asdict())

    def _check_journal(self) -> None:
        try:
            # Of nobody: this only asks whether it could be done.
            self._system.redrive("")
        except InvalidState:
            raise InvalidState(
                f"'{self._name}' has no journal: its last dead letters are in memory. They can be listed and shown, "
                "not redriven or purged, and end with it. Give it a journal: raydispatch deploy … --journal "
                'sqlite:///path/to/file.db, or DispatchEngine(…, journal="sqlite:///path/to/file.db").'
            ) from None


class JournalBox:
    """The letters of a journal that no system has now. It is taken for as long as each call takes, and no longer."""

    def __init__(self, url: str, name: str) -> None:
        self._settings = JournalSettings(url=url)
        self._name = name
        self._scheme = urlsplit(self._settings.url).scheme
        # A file belongs to one process, and says so. On a server, who writes last takes the log from the other.
        self.warning = None if self._scheme == "sqlite" else (
            f"No system may run with this journal: it would lose it. If '{name}' runs, leave --journal away."
        )  # fmt: skip

    def find(self, wanted: LetterFilter) -> list[DeadLetter]:
        """All that are meant."""

        async def found(letters: Letters, _: Journal) -> list[DeadLetter]:
            return [letter async for letter in letters.find(wanted)]

        return self._with(found)

    def redrivable(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """All, if each dispatcher has its place in the journal: what is sent to nobody would be lost."""
        unknown = {letter.outcome.dispatcher_id for letter in letters} - self._with(_subscriptions)
        if unknown:
            raise InvalidState(
                f"The journal has no place for '{min(unknown)}', which begins anew with each start: start the system, "
                f"and redrive there, raydispatch dead-letters redrive {self._name}; or leave it out with --dispatcher."
            )
        return letters

    def purgeable(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """All."""
        return letters

    def redrive(self, wanted: LetterFilter) -> int:
        """Back into the log; they are delivered when the system starts."""
        return self._with(lambda letters, _: letters.redrive(wanted))

    def purge(self, wanted: LetterFilter) -> int:
        """For good."""
        return self._with(lambda letters, _: letters.purge(wanted))

    def _with(self, work: Callable[[Letters, Journal], Awaitable[T]]) -> T:
        path = Path(unquote(urlsplit(self._settings.url).path))
        if self._scheme == "sqlite" and not path.exists():  # Else it would be made.
            raise InvalidParameter(f"There is no journal {path}.")

        async def run() -> T:
            journal = await self._opened()
            log = Log(journal, self._settings, SystemClock())
            try:
                return await work(Letters(log), journal)
            finally:
                await log.close()

        return asyncio.run(run())

    async def _opened(self) -> Journal:
        try:
            return await open_journal(self._settings.url, self._name)
        except JournalUnavailable as error:
            if self._scheme != "sqlite":
                raise
            raise JournalUnavailable(
                f"{error} If it is a system that runs with it, name that, without --journal: raydispatch dead-letters "
                f"list {self._name}."
            ) from None


async def _subscriptions(_: Letters, journal: Journal) -> set[str]:
    found: set[str] = set()
    after = ""
    while page := await journal.documents(CURSORS, after):
        found |= {name for name, _ in page}
        after = page[-1][0]
    return found


def _is_data(letter: DeadLetter) -> bool:
    try:
        pack_letter(letter)
    except InvalidParameter:
        return False
    return True
