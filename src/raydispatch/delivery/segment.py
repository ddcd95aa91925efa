"""A segment: messages that were accepted together, as one run of bytes in a journal."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from raydispatch.errors import InvalidParameter, JournalCorrupt
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import stored

FORMAT = 1
"""Of segments and cursors; readers refuse another one."""

ID_BYTES = 16


class Segment(NamedTuple):
    """Messages in the order of acceptance. Topic and type stand once for all that share them, and payloads are never
    unpacked on the way: whoever routes needs the keys only."""

    ids: bytes
    """The message ids, 16 bytes each."""
    keys: list[list[str]]
    """Topic and message type, each pair once."""
    codes: list[int]
    """For each message, the position of its pair."""
    orders: list[str | None] | None
    """The keys that order is kept for; None if no message has one."""
    due: list[float | None] | None
    """When to deliver, in seconds since 1970; None if none has to wait."""
    to: list[str | None] | None
    """The only subscription that a message is for; None if all are for everybody."""
    blobs: list[bytes]
    """The messages, as `stored` makes them."""

    def __len__(self) -> int:  # Of its messages, not of its fields.
        return len(self.codes)

    def pack(self) -> bytes:
        """As bytes."""
        data: bytes = msgpack.packb((FORMAT, *tuple.__iter__(self)))
        return data

    @classmethod
    def unpack(cls, data: bytes) -> "Segment":
        """From bytes; raises JournalCorrupt if these are none of ours."""
        return cls(*unpacked(data, "segment", len(cls._fields)))

    @classmethod
    def of(
        cls,
        messages: Sequence[tuple[str, Envelope[Any]]],
        due: Sequence[float | None] | None = None,
        to: Sequence[str | None] | None = None,
    ) -> "Segment":
        """Messages with their topics. Raises InvalidParameter for a payload that is no data."""
        pairs: dict[tuple[str, str], int] = {}
        codes = [pairs.setdefault((topic, envelope.message_type), len(pairs)) for topic, envelope in messages]
        _check_text(pairs)
        orders = [envelope.key for _, envelope in messages]
        ids = b"".join([envelope.message_id.bytes for _, envelope in messages])
        blobs = [stored(envelope) for _, envelope in messages]
        return cls(
            ids, [list(pair) for pair in pairs], codes,
            None if orders.count(None) == len(orders) else orders,
            None if due is None else list(due), None if to is None else list(to), blobs,
        )  # fmt: skip

    def message_id(self, row: int) -> bytes:
        """The id of one message."""
        return self.ids[row * ID_BYTES : (row + 1) * ID_BYTES]

    def without(self, rows: Sequence[int]) -> "Segment":
        """The same, less some messages."""
        gone = set(rows)
        stay = [row for row in range(len(self)) if row not in gone]

        def some(values: Sequence[Any] | None) -> Any:
            return None if values is None else [values[row] for row in stay]

        ids = b"".join(self.message_id(row) for row in stay)
        return Segment(
            ids, self.keys, some(self.codes), some(self.orders), some(self.due), some(self.to), some(self.blobs)
        )


def unpacked(data: bytes, what: str, count: int) -> list[Any]:
    """The fields of something that was packed behind its format; raises JournalCorrupt if it is none of ours."""
    try:
        fields: list[Any]
        spoken, *fields = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise JournalCorrupt(f"A {what} in the journal cannot be read ({type(error).__name__}).") from None
    if spoken != FORMAT:
        raise JournalCorrupt(f"A {what} in the journal has format {spoken!r}; this version reads {FORMAT}.")
    if len(fields) != count:
        raise JournalCorrupt(f"A {what} in the journal has {len(fields)} fields; it should have {count}.")
    return fields


def _check_text(pairs: Iterable[tuple[str, str]]) -> None:
    """Half of a character would be found out only when it is written, together with the messages of others."""
    for pair in pairs:
        try:
            "".join(pair).encode()
        except UnicodeEncodeError:
            raise InvalidParameter(f"A topic or a message type is no text: {pair!r}.") from None
