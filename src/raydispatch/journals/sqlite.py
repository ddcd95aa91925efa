"""A journal in one file, for one machine: no server, nothing to install."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from raydispatch.delivery.journal import Batch, Change, Stored
from raydispatch.errors import InvalidParameter, InvalidState
from raydispatch.journals.checking import check_batches, check_changes
from raydispatch.journals.sqlite_file import SqliteFile

_T = TypeVar("_T")

_SYNCHRONOUS = ("full", "normal")


async def open_journal(url: str, name: str) -> "SqliteJournal":
    """The journal in the file at `sqlite:///path/to/file.db`, or `sqlite:relative.db`; it is made if it is not there.

    `?synchronous=normal` does not wait for the disk: faster, and what was accepted last may be lost if the power is.
    """
    path, synchronous = _parse(url)
    journal = SqliteJournal(SqliteFile(path, name, synchronous))
    await journal.open()
    return journal


def _parse(url: str) -> tuple[Path, str]:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise InvalidParameter(f"A file is at sqlite:///path/to/file.db or at sqlite:relative.db; not at {url!r}.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    synchronous = options.pop("synchronous", "full").lower()
    if options:
        raise InvalidParameter(f"A journal in a file has no option '{next(iter(options))}': only synchronous.")
    if synchronous not in _SYNCHRONOUS:
        raise InvalidParameter(f"synchronous is one of {', '.join(_SYNCHRONOUS)}; not {synchronous!r}.")
    return Path(unquote(parts.path)).absolute(), synchronous


class SqliteJournal:
    """A log and documents in one file; see `Journal`. One process has it, and no other can open it meanwhile.

    The file never shrinks: the room of what was trimmed is used again.

    Example: `journal = await open_journal("sqlite:///var/lib/orders.db", "orders")`.
    """

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        # One thread: SQLite waits for the disk, and the event loop must not. It also puts all calls into an order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raydispatch-journal")
        self._is_closed = False

    async def open(self) -> None:
        """Take the file; nobody else has it until `close`."""
        try:
            await self._do(self._file.open)
        except BaseException:
            # Also when whoever waits for it was cancelled: the thread may be about to take the file.
            self._is_closed = True
            self._thread.submit(self._file.close)
            self._thread.shutdown(wait=False)
            raise

    async def append(self, batches: Sequence[Batch], changes: Sequence[Change] = ()) -> list[int]:
        """Keep all of them, in one transaction with the documents."""
        check_batches(batches)
        check_changes(changes)
        return await self._do(lambda: self._file.append(batches, changes))

    async def read(self, offset: int, most_bytes: int = 1_000_000) -> list[Stored]:
        """Batches from this offset on; each is compared with its checksum."""
        return await self._do(lambda: self._file.read(offset, most_bytes))

    async def head(self) -> int:
        """The offset that the next message will get."""
        return await self._do(lambda: self._file.head)

    async def first(self) -> int:
        """The oldest offset kept; the head, if nothing is."""
        return await self._do(self._file.first)

    async def offset_at(self, at: float) -> int:
        """The first message that was appended at this time or later; the head, if there is none."""
        return await self._do(lambda: self._file.offset_at(at))

    async def trim(self, before: int) -> None:
        """Let go of older batches, a few at a time, so that others get their turn in between."""
        while await self._do(lambda: self._file.trim_some(before)):
            pass

    async def write(self, changes: Sequence[Change]) -> None:
        """Write and delete documents, in one transaction."""
        check_changes(changes)
        await self._do(lambda: self._file.append((), changes))

    async def documents(self, bucket: str, after: str = "", most: int = 1_000) -> list[tuple[str, bytes]]:
        """Documents of a bucket in the order of their keys."""
        return await self._do(lambda: self._file.documents(bucket, after, most))

    async def close(self) -> None:
        """Let go of the file, when what was called before is done."""
        if self._is_closed:
            return
        closing = self._do(self._file.close)
        self._is_closed = True
        try:
            await closing
        finally:
            self._thread.shutdown(wait=False)

    def _do(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        if self._is_closed:
            raise InvalidState(f"The journal {self._file.path} is closed.")
        return asyncio.get_running_loop().run_in_executor(self._thread, work)
