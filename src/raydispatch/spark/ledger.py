"""The ledger: one row for each row that was submitted, made from codes, column by column."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raydispatch.actors.rows import Codes, RowDelivery
from raydispatch.dispatch.outcome import BADNESS, WORST_FIRST, Outcome

LEDGER_FORMAT = 1

DISPATCHER = pa.struct(
    [
        pa.field("id", pa.string()),
        pa.field("status", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_code", pa.string()),
    ]
)

LEDGER = pa.schema(
    [
        pa.field("row_id", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("message_type", pa.string()),
        pa.field("status", pa.string()),
        pa.field("dispatchers", pa.list_(DISPATCHER)),
        pa.field("outputs", pa.list_(pa.string())),
        pa.field("error_code", pa.string()),
        pa.field("error", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("duration_ms", pa.float64()),
        pa.field("correlation_id", pa.string()),
        pa.field("trace_id", pa.string()),
        pa.field("table_version", pa.string()),
    ]
)
"""The columns of every ledger. The README says what each means."""

LEDGER_DDL = (
    "row_id string, topic string, message_type string, status string, "
    "dispatchers array<struct<id:string,status:string,attempts:int,error_code:string>>, outputs array<string>, "
    "error_code string, error string, attempts int, duration_ms double, correlation_id string, trace_id string, "
    "table_version string"
)
"""The same, as Spark writes it."""

_STATUSES = pa.array([status.value for status in WORST_FIRST])


class Known(NamedTuple):
    """The columns of a ledger that are known before anything is sent."""

    row_id: pa.Array
    topic: pa.Array
    message_type: pa.Array
    correlation_id: pa.Array
    trace_id: pa.Array


def ledger_of(known: Known, codes: Codes, delivery: RowDelivery) -> pa.RecordBatch:
    """The ledger of a shipment."""
    count = len(codes)
    statuses = delivery.statuses(codes)
    entries = _Entries.of(delivery, codes)
    error_code, error = _errors(entries, delivery, codes, statuses)
    columns = [
        known.row_id,
        known.topic,
        known.message_type,
        _STATUSES.take(pa.array(statuses)),
        pa.ListArray.from_arrays(pa.array(entries.offsets), entries.dispatchers()),
        entries.outputs(),
        error_code,
        error,
        pa.array(entries.most(entries.attempts(), np.int32)),
        pa.array(entries.most(entries.durations_ms, np.float64)),
        known.correlation_id,
        known.trace_id,
        pa.repeat(pa.scalar(delivery.table_version or None, pa.string()), count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=LEDGER)


class _Entries(NamedTuple):
    """Every row's dispatchers, one after the other, row by row: the inside of a column of lists."""

    kinds: list[Outcome]
    codes: npt.NDArray[np.int64]
    """For each entry, the position of its kind."""
    durations_ms: npt.NDArray[np.float32]
    rows: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int32]
    """Where the entries of each row begin; and where the last ones end."""

    @classmethod
    def of(cls, delivery: RowDelivery, codes: Codes) -> "_Entries":
        count = len(codes)
        kinds: list[Outcome] = []
        parts = []
        for dispatcher_id, positions, report in delivery.parts:
            rows = np.arange(count) if positions is None else positions
            numbers = report.codes_of(len(rows)).astype(np.int64) + len(kinds)
            kinds += report.kinds
            parts.append((dispatcher_id, rows, numbers, report.durations_of(len(rows))))
        if not parts:
            nothing = np.zeros(0, np.int64)
            return cls([], nothing, np.zeros(0, np.float32), nothing, np.zeros(count + 1, np.int32))
        if len(parts) == 1:
            _, rows, numbers, durations = parts[0]
        else:
            # Within a row, in the order of selection.
            ranks = np.concatenate([_ranks(delivery, dispatcher_id)[codes[rows]] for dispatcher_id, rows, *_ in parts])
            rows = np.concatenate([rows for _, rows, *_ in parts])
            order = np.lexsort((ranks, rows))
            rows = rows[order]
            numbers = np.concatenate([numbers for *_, numbers, _ in parts])[order]
            durations = np.concatenate([durations for *_, durations in parts])[order]
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
        return cls(kinds, numbers, durations, rows, offsets)

    def dispatchers(self) -> pa.StructArray:
        """Id, status, attempts and error code of each."""
        at = pa.array(self.codes)
        columns = [
            pa.array([kind.dispatcher_id for kind in self.kinds], pa.string()),
            pa.array([kind.status.value for kind in self.kinds], pa.string()),
            pa.array([kind.attempts for kind in self.kinds], pa.int32()),
            pa.array([kind.error_code and kind.error_code.value for kind in self.kinds], pa.string()),
        ]
        return pa.StructArray.from_arrays([column.take(at) for column in columns], fields=list(DISPATCHER))

    def attempts(self) -> npt.NDArray[np.int32]:
        return np.array([kind.attempts for kind in self.kinds], np.int32)[self.codes]

    def most(self, values: npt.NDArray[np.generic], kind: type[np.generic]) -> npt.NDArray[np.generic]:
        """For each row, the largest value of its entries; 0 if it has none."""
        found = np.zeros(len(self.offsets) - 1, kind)
        has = self.offsets[1:] > self.offsets[:-1]
        if len(values):
            found[has] = np.maximum.reduceat(values, self.offsets[:-1][has])
        return found

    def outputs(self) -> pa.ListArray:
        """The topics that handlers returned."""
        lists = pa.array([list(kind.outputs) for kind in self.kinds], pa.list_(pa.string())).take(pa.array(self.codes))
        offsets = lists.offsets.to_numpy()[self.offsets] if len(lists) else self.offsets
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), lists.values)


def _ranks(delivery: RowDelivery, dispatcher_id: str) -> npt.NDArray[np.int64]:
    """For each key, the place of a dispatcher in its selection."""
    return np.array(
        [
            next((place for place, target in enumerate(one.targets) if target[0] == dispatcher_id), 0)
            for one in delivery.selections
        ]
    )


def _errors(
    entries: _Entries, delivery: RowDelivery, codes: Codes, statuses: npt.NDArray[np.uint8]
) -> tuple[pa.Array, pa.Array]:
    """For each row, the code of the first of the worst, and every dispatcher's error, each behind its id."""
    faults = [selection.fault for selection in delivery.selections]
    has_fault = any(fault is not None for fault in faults)
    has_error = np.array([kind.error_message is not None for kind in entries.kinds], bool)
    if not has_fault and not has_error.any():
        nothing = pa.nulls(len(codes), pa.string())
        return nothing, nothing
    at = pa.array(codes)
    error_code = pa.array([fault and fault[1] for fault in faults], pa.string()).take(at)
    error = pa.array([fault and fault[2] for fault in faults], pa.string()).take(at)
    if not has_error.any():
        return error_code, error
    wrong = has_error[entries.codes]
    rows, numbers = entries.rows[wrong], entries.codes[wrong]
    badness = np.array([BADNESS[kind.status] for kind in entries.kinds], np.uint8)[numbers]
    # The first of those as bad as their row; a stable order keeps the order of selection.
    order = np.lexsort((badness != statuses[rows], rows))
    first_rows, first = np.unique(rows[order], return_index=True)
    names = pa.array([kind.error_code and kind.error_code.value for kind in entries.kinds], pa.string())
    texts = pa.array([f"{kind.dispatcher_id}: {kind.error_message}" for kind in entries.kinds], pa.string())
    offsets = np.searchsorted(rows, np.append(first_rows, len(codes)))
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts.take(pa.array(numbers)))
    return (
        _placed(error_code, first_rows, names.take(pa.array(numbers[order][first]))),
        _placed(error, first_rows, pc.binary_join(lists, "; ")),
    )


def _placed(column: pa.Array, rows: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    mask = np.zeros(len(column), bool)
    mask[rows] = True
    return pc.replace_with_mask(column, pa.array(mask), values)
