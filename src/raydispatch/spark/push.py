"""Push: what a Spark worker does with the rows of its partition. It has a gateway of its own to the routers."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import ray

from raydispatch.actors.connect import join
from raydispatch.actors.line import Line
from raydispatch.actors.rows import Codes, RowDelivery, RowKey, Shipment
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import ErrorCode
from raydispatch.messages.envelope import MAX_ID_LENGTH
from raydispatch.settings import SystemSettings
from raydispatch.spark.ids import Occurrences, binary_of, ids_of, parsed, text_of
from raydispatch.spark.ledger import Known, ledger_of

WINDOW = 3
"""Shipments of one partition under way: while one is worked on, the next one is on its way."""
MAX_SHIPMENT_BYTES = 16_000_000

_TRACEPARENT = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
_INVALID = DispatchStatus.INVALID_MESSAGE.value


class Order(NamedTuple):
    """What a worker is told: where the system is, and how the job is to be done."""

    system: str
    address: str
    settings: SystemSettings
    max_payload_bytes: int
    hold_seconds: float = 0.0
    repeated: bool = False
    """Whether these rows may have been sent before."""
    tell_as: str | None = None
    """The job, if somebody wants to see how far it is."""


def push(
    order: Order,
    batches: Iterator[pa.RecordBatch],
    repeated: bool = False,
    occurrences: Occurrences | None = None,
) -> Iterator[pa.RecordBatch]:
    """Send the rows of a partition, and yield their ledger as it comes back."""
    line = _line(order)
    under_way: deque[tuple[Known, Codes, Future[RowDelivery]]] = deque()
    occurrences = occurrences or Occurrences()
    for batch in batches:
        for piece in _pieces(batch):
            rows = _Rows(piece, order, occurrences)
            shipment = Shipment(
                rows.keys, rows.codes, [ray.put(rows.content)], order.settings.call_seconds + order.hold_seconds,
                order.hold_seconds, order.repeated or repeated,
            )  # fmt: skip
            under_way.append((rows.known, rows.codes, line.send_rows(shipment)))
            if len(under_way) >= WINDOW:
                yield _returned(order, line, *under_way.popleft())
    while under_way:
        yield _returned(order, line, *under_way.popleft())


def _returned(order: Order, line: Line, known: Known, codes: Codes, answer: "Future[RowDelivery]") -> pa.RecordBatch:
    ledger = ledger_of(known, codes, answer.result())
    if order.tell_as is not None:
        found = pc.value_counts(ledger.column("status"))
        counts = zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)
        line.note(order.tell_as, dict(counts))
    return ledger


class _Rows:
    """The rows of a batch: keys and codes for the router, content for the dispatchers, the rest for the ledger."""

    def __init__(self, batch: pa.RecordBatch, order: Order, occurrences: Occurrences) -> None:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        ids = ids_of(columns["hash_1"], columns["hash_2"])
        if "row_id" not in columns:
            ids = occurrences.apart(ids)
        message_id = binary_of(ids)
        faults = _Faults(batch.num_rows)
        faults.add(pc.is_null(columns["topic"]), ErrorCode.INVALID_TOPIC, "it has no topic")
        if "row_id" in columns:
            # They would all be one message.
            faults.add(pc.is_null(columns["row_id"]), ErrorCode.PAYLOAD_INVALID, "its message_id is null")
        content = {"message_id": message_id, "payload": columns["payload"]}
        faults.add(_too_large(columns["payload"], order.max_payload_bytes), ErrorCode.PAYLOAD_TOO_LARGE,
                   f"the payload has more than {order.max_payload_bytes:,} bytes")  # fmt: skip
        for name in ("key", "message_type"):
            if name in columns:
                is_long = pc.greater(pc.utf8_length(columns[name]), MAX_ID_LENGTH)
                words = f"its {name} has more than {MAX_ID_LENGTH} characters"
                faults.add(is_long, ErrorCode.PAYLOAD_INVALID, words)
        if "key" in columns:
            content["key"] = columns["key"]
        trace_id = pa.nulls(batch.num_rows, pa.string())
        if "traceparent" in columns:
            is_one = pc.match_substring_regex(columns["traceparent"], _TRACEPARENT)
            content["traceparent"] = pc.if_else(is_one, columns["traceparent"], pa.scalar(None, pa.string()))
            trace_id = pc.utf8_slice_codeunits(content["traceparent"], 3, 35)
        correlation_id = message_id
        if "correlation_id" in columns:
            given, wrong = parsed(columns["correlation_id"])
            faults.add(pa.array(wrong), ErrorCode.PAYLOAD_INVALID, "its correlation_id is no UUID")
            correlation_id = content["correlation_id"] = pc.coalesce(given, message_id)
        self.content = pa.table(content)
        self.keys, self.codes = _keys(columns, faults)
        message_text = text_of(message_id)
        self.known = Known(
            columns.get("row_id", message_text),
            columns["topic"],
            columns.get("message_type", pa.nulls(batch.num_rows, pa.string())),
            message_text if correlation_id is message_id else text_of(correlation_id),
            trace_id,
        )


class _Faults:
    """Rows that go nowhere, and why; the first reason counts."""

    def __init__(self, count: int) -> None:
        self.codes = np.full(count, -1, np.int32)
        self.kinds: list[tuple[str, str, str]] = []

    def add(self, mask: Any, code: ErrorCode, words: str) -> None:
        found = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
        if found.any():
            self.codes[found & (self.codes < 0)] = len(self.kinds)
            self.kinds.append((_INVALID, code.value, words))


def _keys(columns: dict[str, pa.Array], faults: _Faults) -> tuple[list[RowKey], Codes]:
    topics, codes = _encoded(columns["topic"])
    keys = [RowKey(topic, None) for topic in topics]
    if "message_type" in columns:
        types, numbers = _encoded(columns["message_type"])
        if len(types) == 1:
            keys = [key._replace(message_type=types[0]) for key in keys]
        else:
            pairs, codes = _combined(codes, numbers, len(types))
            keys = [keys[pair // len(types)]._replace(message_type=types[pair % len(types)]) for pair in pairs]
    if "only" in columns:
        groups, numbers = _encoded(columns["only"])
        pairs, codes = _combined(codes, numbers, len(groups))
        keys = [keys[pair // len(groups)]._replace(only=_names(groups[pair % len(groups)])) for pair in pairs]
    if faults.kinds:
        codes = np.where(faults.codes >= 0, faults.codes + len(keys), codes).astype(np.int32)
        keys += [RowKey(None, None, None, fault) for fault in faults.kinds]
    return keys, codes


def _encoded(column: pa.Array) -> tuple[list[Any], Codes]:
    found = pc.dictionary_encode(column, null_encoding="encode")
    return found.dictionary.to_pylist(), found.indices.to_numpy(zero_copy_only=False)


def _combined(codes: Codes, numbers: Codes, width: int) -> tuple[list[int], Codes]:
    return _encoded(pa.array(codes.astype(np.int64) * width + numbers))


def _names(text: str | None) -> tuple[str, ...] | None:
    """The dispatchers that a row is for; they were joined by a line break, which no id has."""
    return None if text is None else tuple(text.split("\n"))


def _too_large(payload: pa.Array, most: int) -> Any:
    if payload.nbytes <= most:
        return pa.array(np.zeros(len(payload), bool))
    return pc.greater(_sizes(payload), most)


def _sizes(payload: pa.Array) -> Any:
    """How many bytes the texts of each payload have, at any depth."""
    kind = payload.type
    if pa.types.is_fixed_size_list(kind):
        payload = payload.cast(pa.list_(kind.value_type))
        kind = payload.type
    if any(test(kind) for test in _TEXTS):
        return pc.fill_null(pc.binary_length(payload), 0).cast(pa.int64())
    if pa.types.is_struct(kind):
        parts = [_sizes(field) for field in payload.flatten()]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        inner = [payload.keys, payload.items] if pa.types.is_map(kind) else [payload.values]
        offsets = payload.offsets.to_numpy()
        parts = []
        for values in inner:
            sums: npt.NDArray[np.int64] = np.append(0, np.cumsum(np.asarray(_sizes(values))))
            parts.append(pa.array(sums[offsets[1:]] - sums[offsets[:-1]]))
    else:
        parts = []
    total: Any = pa.array(np.full(len(payload), 8, np.int64))
    for part in parts:
        total = pc.add(total, part)
    return total


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts that are not too large for a call; a single larger row still goes, alone."""
    if batch.nbytes <= MAX_SHIPMENT_BYTES:
        if batch.num_rows:
            yield batch
        return
    payload = batch.column("payload")
    beside = -(-(batch.nbytes - payload.nbytes) // batch.num_rows) + 16
    ends = np.cumsum(np.asarray(_sizes(payload)) + beside)
    start = 0
    while start < batch.num_rows:
        done = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, done + MAX_SHIPMENT_BYTES, side="right")))
        yield batch.slice(start, end - start)
        start = end


_lines: dict[tuple[str, str], Line] = {}
_opening = threading.Lock()


def _line(order: Order) -> Line:
    """One for each system and process: Spark uses its workers again."""
    with _opening:
        join(order.address)
        key = (order.address, order.system)
        if key not in _lines:
            _lines[key] = Line(order.system, order.settings)
        return _lines[key]
