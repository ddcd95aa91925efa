"""The journal: a durable log of messages, and a few documents beside it. What it has accepted survives every process.

One protocol, two implementations: `raydispatch.journals.sqlite` in one file, `raydispatch.journals.nats` on a server.
Everything that counts is decided elsewhere; a journal keeps bytes, in order, and gives them back.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from raydispatch.errors import InvalidParameter, MissingExtra


class Batch(NamedTuple):
    """Messages to be appended as one."""

    data: bytes
    count: int  # type: ignore[assignment]  # The word is a method of tuples, which nobody needs here.
    """How many messages; each has an offset of its own."""
    batch_id: str
    """Of two batches with one id, appended shortly after each other, a journal may keep the first only."""


class Stored(NamedTuple):
    """Messages that were appended as one."""

    first: int
    """The offset of the first of them."""
    count: int  # type: ignore[assignment]  # The word is a method of tuples, which nobody needs here.
    at: float
    """When they were appended, in seconds since 1970."""
    data: bytes


class Change(NamedTuple):
    """A document to be written, or to be deleted."""

    bucket: str
    key: str
    value: bytes | None


class Journal(Protocol):
    """A log whose messages are numbered without gaps, and buckets of documents. One process has it at a time.

    What cannot be reached for now, or has no room, raises `JournalUnavailable`, and may be tried again with the same
    batches: nothing that was accepted is lost by that, and nothing is kept twice. (With a server, it may be the answer
    that was lost: then the call was done.) What is broken raises `JournalCorrupt`.
    """

    async def append(self, batches: Sequence[Batch], changes: Sequence[Change] = ()) -> list[int]:
        """Keep all of them, for good, and the offset of each batch's first message. Documents are written along."""

    async def read(self, offset: int, most_bytes: int = 1_000_000) -> list[Stored]:
        """Batches in order, from the one that has this offset: at least one, if there is one; from the oldest kept if
        the offset is gone already; nothing at the head."""

    async def head(self) -> int:
        """The offset that the next message will get."""

    async def first(self) -> int:
        """The oldest offset kept; the head, if nothing is."""

    async def offset_at(self, at: float) -> int:
        """The first message that was appended at this time or later; the head, if there is none."""

    async def trim(self, before: int) -> None:
        """Let go of batches all of whose messages are older than this offset. Those with newer ones stay whole."""

    async def write(self, changes: Sequence[Change]) -> None:
        """Write and delete documents."""

    async def documents(self, bucket: str, after: str = "", most: int = 1_000) -> list[tuple[str, bytes]]:
        """Documents of a bucket in the order of their keys: those behind this key, so many at most."""

    async def close(self) -> None:
        """Let go of it."""


_HOMES = {
    "sqlite": "raydispatch.journals.sqlite",
    "nats": "raydispatch.journals.nats",
    "tls": "raydispatch.journals.nats",
}


async def open_journal(url: str, name: str) -> Journal:
    """The journal at an address: `sqlite:///path/orders.db`, or `nats://host:4222`, where `name` names its streams."""
    scheme = urlsplit(url).scheme
    if scheme not in _HOMES:
        raise InvalidParameter(
            f"A journal is at sqlite:///path/to/file.db or at nats://host:4222; not at {_shown(url)!r}."
        )
    try:
        home = import_module(_HOMES[scheme])
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or scheme, "nats") from None
    journal: Journal = await home.open_journal(url, name)
    return journal


def _shown(url: str) -> str:
    """Without what may be a password."""
    parts = urlsplit(url)
    return url.replace(parts.netloc, parts.netloc.rpartition("@")[2]) if "@" in parts.netloc else url
