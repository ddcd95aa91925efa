"""The file of a journal: what SQLite is asked to do, one call after the other, in one thread."""

import sqlite3
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

from raydispatch.delivery.journal import Batch, Change, Stored
from raydispatch.errors import InvalidParameter, JournalCorrupt
from raydispatch.journals.checking import until_full
from raydispatch.journals.sqlite_making import FORMAT, MARK, make, sentences

CHECKPOINT_BYTES = 8_000_000
"""So much is collected beside the file before it goes in: every commit that fills it waits a few milliseconds."""
MOST_WAL_BYTES = 64_000_000
"""One large append may need more; it is given back."""
WAIT_SECONDS = 0.25
"""For a process that is just ending. One that runs will not let go."""
TRIM_BATCHES = 200
"""Let go of in one transaction: a few milliseconds, in which nobody can append."""


class SqliteFile:
    """A log and documents in a database of SQLite, which nobody else can open meanwhile."""

    def __init__(self, path: Path, name: str, synchronous: str) -> None:
        self.path = path
        self.head = 0
        """The offset that the next message will get."""
        self._name = name
        self._synchronous = synchronous
        self._last_at = 0.0

    def open(self) -> None:
        """Take the file; make it, if there is none."""
        if self.path.is_dir():
            raise InvalidParameter(f"{self.path} is a directory: a journal is a file.")
        if not self.path.exists():
            make(self.path, self._name)
        with sentences(self.path):
            self._db = sqlite3.connect(
                f"{self.path.as_uri()}?mode=rw", uri=True, timeout=WAIT_SECONDS, isolation_level=None
            )
            # Nobody else may write, so nobody else need look: the index of the WAL stays in memory, too.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._check()
            self._configure()
            self._find_head()
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            with suppress(FileNotFoundError, PermissionError):
                path.chmod(0o600)  # It may have come from a backup.

    def append(self, batches: Sequence[Batch], changes: Sequence[Change]) -> list[int]:
        """Keep these, all of them or none."""
        # A clock may be set back; the times of a log never are, so that one can search by them.
        at = max(time(), self._last_at)
        firsts, head = [], self.head
        with self._transaction():
            for data, count, _ in batches:
                row = (head, count, at, _checksum(data, head, count, at), data)
                self._db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", row)
                firsts.append(head)
                head += count
            for bucket, key, value in changes:
                if value is None:
                    self._db.execute("DELETE FROM documents WHERE bucket = ? AND key = ?", (bucket, key))
                else:
                    kept = (bucket, key, zlib.crc32(value), value)
                    self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)", kept)
        self.head = head
        self._last_at = at
        return firsts

    def read(self, offset: int, most_bytes: int) -> list[Stored]:
        """Batches from this offset on, so many bytes at most, or one."""
        with sentences(self.path):
            before = self._span(offset)
            start = self._batch_of(offset)
            sizes = self._sizes(start, most_bytes)
            rows = self._db.execute(
                "SELECT * FROM log WHERE first >= ? ORDER BY first LIMIT ?", (start, until_full(sizes, most_bytes))
            ).fetchall()
        # If older ones are kept, this one must be, too.
        return list(self._verified(rows, None if before is None else start))

    def first(self) -> int:
        """The oldest offset kept."""
        with sentences(self.path):
            (first,) = self._db.execute("SELECT min(first) FROM log").fetchone()
        return self.head if first is None else int(first)

    def offset_at(self, at: float) -> int:
        """The first message that was appended at this time or later."""
        low, high = self.first(), self.head
        with sentences(self.path):
            while low < high:
                middle = (low + high) // 2
                span = self._span(middle)
                if span is None or span[1] <= middle:
                    raise JournalCorrupt(f"The batch with offset {middle} in {self.path} is missing. {_ADVICE}")
                first, end, appended = span
                low, high = (low, first) if appended >= at else (end, high)
        return low

    def trim_some(self, before: int) -> bool:
        """Let go of some older batches; whether there are more."""
        with sentences(self.path):
            stays = min(self._batch_of(before), self.head)
        if stays <= self.first():
            return False
        with self._transaction():
            # Otherwise nothing would tell where it was, if all of them go.
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'head'", (str(self.head),))
            gone = self._db.execute(
                "DELETE FROM log WHERE first IN (SELECT first FROM log WHERE first < ? ORDER BY first LIMIT ?)",
                (stays, TRIM_BATCHES),
            )
        return gone.rowcount == TRIM_BATCHES

    def documents(self, bucket: str, after: str, most: int) -> list[tuple[str, bytes]]:
        """A page of a bucket."""
        with sentences(self.path):
            rows = self._db.execute(
                "SELECT key, crc, value FROM documents WHERE bucket = ? AND key > ? ORDER BY key LIMIT ?",
                (bucket, after, max(0, most)),
            ).fetchall()
        for key, crc, value in rows:
            if not isinstance(value, bytes) or zlib.crc32(value) != crc:
                raise JournalCorrupt(f"The document '{key}' of '{bucket}' in {self.path} is damaged. {_ADVICE}")
        return [(key, value) for key, _, value in rows]

    def close(self) -> None:
        """Let go of the file. What was collected beside it goes in."""
        with suppress(AttributeError, sqlite3.Error):  # It may never have been opened.
            self._db.close()

    def _check(self) -> None:
        (mark,) = self._db.execute("PRAGMA application_id").fetchone()
        if mark != MARK:
            raise JournalCorrupt(
                f"The file {self.path} is no journal of raydispatch, or it was emptied. Restore it from a backup; if "
                "it is something else, choose another path."
            )
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise JournalCorrupt(
                f"The journal {self.path} has format {meta.get('format')}, and this version of raydispatch reads "
                f"{FORMAT}: open it with the version that wrote it, or move it away."
            )
        if meta.get("name") != self._name:
            raise InvalidParameter(f"The file {self.path} holds the journal '{meta.get('name')}', not '{self._name}'.")

    def _configure(self) -> None:
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        for pragma in (
            "journal_mode = WAL",  # As it was made; a copy may have lost that.
            f"wal_autocheckpoint = {CHECKPOINT_BYTES // page_bytes}",
            f"journal_size_limit = {MOST_WAL_BYTES}",
            f"synchronous = {self._synchronous}",
            "fullfsync = ON",  # On a Mac, the plain call does not wait for the disk.
            "secure_delete = OFF",  # Some builds have it on: to let go of a gigabyte would be to write one.
        ):
            self._db.execute(f"PRAGMA {pragma}")
        # Takes the lock for good.
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("COMMIT")

    def _find_head(self) -> None:
        (known,) = self._db.execute("SELECT value FROM meta WHERE key = 'head'").fetchone()
        last = self._db.execute("SELECT first + count, at FROM log ORDER BY first DESC LIMIT 1").fetchone()
        end, self._last_at = last or (0, 0.0)
        self.head = max(int(known), end)

    def _batch_of(self, offset: int) -> int:
        """Where the batch begins that has this offset; the oldest, if it is gone."""
        span = self._span(offset)
        return offset if span is None or span[1] <= offset else span[0]

    def _sizes(self, start: int, most_bytes: int) -> list[int]:
        """Of the batches that could be read: SQLite knows them without reading what is in there."""
        sizes: list[int] = []
        rows = self._db.execute("SELECT length(data) FROM log WHERE first >= ? ORDER BY first", (start,))
        for (size,) in rows:
            sizes.append(size)
            most_bytes -= size
            if most_bytes < 0:
                break
        rows.close()  # An unfinished statement would hold the WAL.
        return sizes

    def _verified(self, rows: list[tuple[int, int, float, int, bytes]], end: int | None) -> Iterator[Stored]:
        for first, count, at, crc, data in rows:
            if end not in (None, first) or crc != _checksum(data, first, count, at):
                raise JournalCorrupt(f"The batch at offset {first} in {self.path} is damaged or missing. {_ADVICE}")
            end = first + count
            yield Stored(first, count, at, data)

    def _span(self, offset: int) -> tuple[int, int, float] | None:
        """Of the last batch that begins here or before: where it begins and ends, and when it was appended."""
        span: tuple[int, int, float] | None = self._db.execute(
            "SELECT first, first + count, at FROM log WHERE first <= ? ORDER BY first DESC LIMIT 1", (offset,)
        ).fetchone()
        return span

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with sentences(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back already, as it does when the disk is full.
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise


_ADVICE = "Restore the file from a backup, or move it away to begin with an empty journal."


def _checksum(data: bytes, first: int, count: int, at: float) -> int:
    try:
        return zlib.crc32(data, zlib.crc32(struct.pack("<qqd", first, count, at)))
    except (TypeError, struct.error):
        return -1  # Values of other types: nothing that was written like that.
