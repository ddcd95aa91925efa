"""Batches: many messages as Arrow columns. Payloads are opaque; nothing on the way needs to look inside."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json, to_json

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.ids import uuid_of

_ID = pa.binary(16)

COLUMNS = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("message_type", pa.string()),
        pa.field("key", pa.string()),
        pa.field("message_id", _ID),
        pa.field("correlation_id", _ID),
        pa.field("causation_id", _ID),
        pa.field("traceparent", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
        pa.field("attempt", pa.int32()),
        pa.field("hops", pa.int32()),
        pa.field("encoding", pa.int8()),
    ]
)
"""The columns of every batch, beside `payload`, whose type is the sender's."""

# How a payload became bytes. NATIVE: it did not, the column is the sender's own.
NATIVE, BYTES, TEXT, JSON = range(4)


class MessageBatch:
    """Messages as columns, in order. Immutable, as Arrow is.

    Example: `MessageBatch.from_envelopes([("dev.order.events.v1", envelope)])`.
    """

    __slots__ = ("table",)

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def from_envelopes(cls, messages: Iterable[tuple[str, Envelope[Any]]]) -> "MessageBatch":
        """Pack pairs of topic and envelope. Bytes and text stay as they are; any other payload becomes JSON."""
        rows = [(topic, envelope, *_encode(envelope)) for topic, envelope in messages]
        columns: dict[str, Any] = {
            "topic": [topic for topic, *_ in rows],
            "message_type": [envelope.message_type for _, envelope, *_ in rows],
            "key": [envelope.key for _, envelope, *_ in rows],
            "message_id": [envelope.message_id.bytes for _, envelope, *_ in rows],
            "correlation_id": [envelope.correlation_id.bytes for _, envelope, *_ in rows],
            "causation_id": [envelope.causation_id and envelope.causation_id.bytes for _, envelope, *_ in rows],
            "traceparent": [envelope.traceparent for _, envelope, *_ in rows],
            "headers": [list(envelope.headers.items()) for _, envelope, *_ in rows],
            "attempt": [envelope.attempt for _, envelope, *_ in rows],
            "hops": [envelope.hops for _, envelope, *_ in rows],
            "encoding": [encoding for *_, encoding in rows],
            "payload": [payload for _, _, payload, _ in rows],
        }
        return cls(pa.table(columns, schema=COLUMNS.append(pa.field("payload", pa.binary()))))

    @classmethod
    def from_table(cls, table: pa.Table) -> "MessageBatch":
        """Take a table with the columns `topic` and `payload`, and any of the others; what is missing is filled in."""
        missing = {"topic", "payload"} - set(table.column_names)
        if missing:
            raise InvalidParameter(
                f"The table has no column {' and no '.join(sorted(missing))}; it has {', '.join(table.column_names)}."
            )
        unknown = set(table.column_names) - set(COLUMNS.names) - {"payload"}
        if unknown:
            raise InvalidParameter(
                f"A batch has no column {', '.join(sorted(unknown))}: put it into the payload or drop it first."
            )
        columns = [_column(table, field) for field in COLUMNS]
        return cls(pa.table([*columns, table["payload"]], names=[*COLUMNS.names, "payload"]))

    def to_envelopes(self) -> Iterator[tuple[str, Envelope[Any]]]:
        """Unpack into pairs of topic and envelope."""
        columns = {name: self.table[name].to_pylist() for name in self.table.column_names}
        for row in zip(*(columns[name] for name in (*COLUMNS.names, "payload")), strict=True):
            topic, kind, key, message_id, correlation_id, causation_id, traceparent, headers, attempt, hops = row[:10]
            yield topic, Envelope(
                _decode(row[11], row[10]), kind or "", topic or "", key, _uuid(message_id), _uuid(correlation_id),
                causation_id and _uuid(causation_id), traceparent, dict(headers or ()), attempt, hops,
            )  # fmt: skip

    def distinct_keys(self) -> tuple[list[tuple[str | None, str | None]], pa.ChunkedArray]:
        """The distinct (topic, message type) pairs, and for each row the index of its pair."""
        topics = _encoded(self.table["topic"])
        types = _encoded(self.table["message_type"])
        topic_names = _dictionary(topics)
        type_names = _dictionary(types)
        pairs = _pair_codes(topics, types, len(topic_names), len(type_names))
        distinct = _encoded(pairs)
        keys = [
            (topic_names[pair // len(type_names)], type_names[pair % len(type_names)]) for pair in _dictionary(distinct)
        ]
        return keys, _indices(distinct)

    def take(self, indices: "pa.Array | Sequence[int]") -> "MessageBatch":
        """The messages at these positions, in this order."""
        return MessageBatch(
            self.table.take(indices if isinstance(indices, pa.Array) else pa.array(indices, pa.int64()))
        )

    def split(self, parts: "Sequence[pa.Array | Sequence[int]]") -> list["MessageBatch"]:
        """One batch for each list of positions."""
        return [self.take(indices) for indices in parts]

    @classmethod
    def merge(
        cls, parts: "Sequence[MessageBatch]", positions: "Sequence[pa.Array | Sequence[int]] | None" = None
    ) -> "MessageBatch":
        """Put parts together, one after the other, or, given the positions they were split by, as they stood."""
        if not parts:
            raise InvalidParameter("There is nothing to merge: the list of parts is empty.")
        merged = cls(pa.concat_tables([part.table for part in parts]))
        if positions is None:
            return merged
        flat = pa.concat_arrays([pa.array(indices, pa.int64()) for indices in positions])
        return merged.take(pc.sort_indices(flat))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __eq__(self, other: object) -> bool:
        return bool(self.table.equals(other.table)) if isinstance(other, MessageBatch) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)}>"


def _encode(envelope: Envelope[Any]) -> tuple[bytes, int]:
    payload = envelope.payload
    if isinstance(payload, bytes):
        return payload, BYTES
    try:
        if isinstance(payload, str):
            return payload.encode(), TEXT
        return to_json(payload), JSON
    except Exception as error:
        raise InvalidParameter(
            f"The payload of message {envelope.message_id} ({type(payload).__name__}) is no data: {error}"
        ) from error


def _decode(payload: Any, encoding: int) -> Any:
    if encoding == JSON:
        return from_json(payload)
    return payload.decode() if encoding == TEXT else payload


def _uuid(identity: bytes) -> Any:
    return uuid_of(int.from_bytes(identity, "big"))


def _column(table: pa.Table, field: pa.Field) -> Any:
    if field.name in table.column_names:
        column = table[field.name].cast(field.type)
        # An id is needed for every message; a null one counts as not given.
        needs_ids = field.name in ("message_id", "correlation_id") and column.null_count
        return pc.coalesce(column, _random_ids(table.num_rows)) if needs_ids else column
    defaults: Mapping[str, int] = {"attempt": 1, "hops": 0, "encoding": NATIVE}
    if field.name in defaults:
        return pa.repeat(pa.scalar(defaults[field.name], field.type), table.num_rows)
    if field.name in ("message_id", "correlation_id"):
        return _random_ids(table.num_rows)
    return pa.nulls(table.num_rows, field.type)


def _random_ids(count: int) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(_ID, count, [None, pa.py_buffer(os.urandom(16 * count))])


def _encoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    # All chunks come out with one dictionary. (Unifying them would raise: Arrow can't, where a dictionary has a null.)
    return pc.dictionary_encode(column, null_encoding="encode")


def _dictionary(encoded: pa.ChunkedArray) -> list[Any]:
    return list(encoded.chunk(0).dictionary.to_pylist()) if encoded.num_chunks else []


def _indices(encoded: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([chunk.indices for chunk in encoded.chunks], pa.int32())


def _pair_codes(topics: pa.ChunkedArray, types: pa.ChunkedArray, topic_count: int, type_count: int) -> pa.ChunkedArray:
    """Number the pairs: code of the topic × number of types + code of the type."""
    width = pa.int32() if topic_count * type_count < 2**31 else pa.int64()
    scaled = pc.multiply(_indices(topics).cast(width), pa.scalar(type_count, width))
    return pc.add(scaled, _indices(types).cast(width))
