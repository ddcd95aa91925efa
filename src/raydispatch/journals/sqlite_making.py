"""How the file of a journal comes into being, and what its faults are called."""

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raydispatch.errors import DispatchError, InvalidParameter, JournalCorrupt, JournalUnavailable

FORMAT = "1"
"""Of the tables; another one is refused."""
MARK = int.from_bytes(b"rayd")
"""In the header of the file: it is one of ours."""
PAGE_BYTES = 16_384
"""Batches are large: with 4,096, appending 200 KB took a third longer, and reading twice as long."""

_SCHEMA = f"""
PRAGMA page_size = {PAGE_BYTES};
PRAGMA journal_mode = WAL;
PRAGMA application_id = {MARK};
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE log (first INTEGER PRIMARY KEY, count INTEGER, at REAL, crc INTEGER, data BLOB);
CREATE TABLE documents (
    bucket TEXT, key TEXT, crc INTEGER, value BLOB, PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
"""


def make(path: Path, name: str) -> None:
    """An empty journal, for its owner's eyes only. It appears as a whole: no crash leaves half of one."""
    if not path.parent.is_dir():
        raise InvalidParameter(f"There is no directory {path.parent} for the journal {path.name}: make it first.")
    try:
        number, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # Its mode is 0600.
    except OSError as error:
        raise InvalidParameter(f"No journal can be made in {path.parent}: {error.strerror}.") from None
    os.close(number)
    try:
        with sentences(path):
            _fill(draft, name)
            # A link, since a file that came meanwhile, by another process, must not be replaced.
            with suppress(FileExistsError):
                os.link(draft, path)
            _flush(path.parent)
    finally:
        os.unlink(draft)


def _fill(draft: str, name: str) -> None:
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        db.executescript(_SCHEMA)
        db.executemany("INSERT INTO meta VALUES (?, ?)", [("format", FORMAT), ("name", name), ("head", "0")])
    finally:
        db.close()


def _flush(directory: Path) -> None:
    """The name of a new file lasts when its directory is on the disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def sentences(path: Path) -> Iterator[None]:
    """Say what SQLite says in our words, and as our errors."""
    try:
        yield
    except sqlite3.Error as error:
        raise _named(error, path) from error
    except OSError as error:
        raise JournalUnavailable(f"The journal {path} cannot be reached: {error.strerror}.") from error


def _named(error: sqlite3.Error, path: Path) -> DispatchError | sqlite3.Error:
    match getattr(error, "sqlite_errorcode", -1) & 0xFF:
        case 0xFF:  # None of SQLite's: the module sqlite3 was used wrongly.
            return error
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JournalUnavailable(
                f"The journal {path} is in use by another process. One has it at a time: stop that one, or give this "
                "one a file of its own."
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_ERROR:
            return JournalCorrupt(
                f"The file {path} is damaged, or no journal of raydispatch ({error}). Restore it from a backup, or "
                "move it away (with the -wal file beside it) to begin with an empty journal."
            )
        case sqlite3.SQLITE_FULL:
            return JournalUnavailable(
                f"The disk of the journal {path} is full: nothing of this was kept. Make room, then try again."
            )
        case sqlite3.SQLITE_TOOBIG:
            return InvalidParameter(f"A batch or document is larger than SQLite takes ({error}): make it smaller.")
        case _:
            return JournalUnavailable(f"The journal {path} cannot be used: {error}. Nothing of this was kept.")
