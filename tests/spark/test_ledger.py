import re
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.actors.rows import Codes, RowDelivery, RowReport, RowsDone
from raydispatch.actors.wire import Selection
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, combined_error, worst_status
from raydispatch.errors import ErrorCode
from raydispatch.spark.ledger import LEDGER, LEDGER_DDL, Known, ledger_of

FAULTS = [
    (DispatchStatus.INVALID_MESSAGE.value, ErrorCode.INVALID_TOPIC.value, "it has no topic"),
    (DispatchStatus.NO_DISPATCHER.value, ErrorCode.NO_DISPATCHER.value, "nobody takes it"),
]
ENDS = [status for status in DispatchStatus if status.is_terminal()]


class Case(NamedTuple):
    """A delivery, and the same as a list of outcomes for each row, in the order of selection."""

    codes: Codes
    delivery: RowDelivery
    by_row: list[list[Outcome]]


@st.composite
def outcomes(draw: st.DrawFn, dispatcher_id: str) -> Outcome:
    status = draw(st.sampled_from(ENDS))
    is_well = status in (DispatchStatus.SUCCESS, DispatchStatus.SKIPPED)
    has_error = not is_well and draw(st.booleans())
    return Outcome(
        dispatcher_id,
        status,
        outputs=tuple(draw(st.lists(st.sampled_from(["dev.a.events", "dev.b.events"]), max_size=2)) if is_well else ()),
        attempts=draw(st.integers(0, 4)),
        error_code=draw(st.none() | st.sampled_from(list(ErrorCode))) if has_error else None,
        error_message=draw(st.sampled_from(["", "down", "a; b"])) if has_error else None,
    )


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    names = draw(st.lists(st.sampled_from("abc"), unique=True))
    return Selection(tuple((name, f"to-{name}") for name in names), None if names else draw(st.sampled_from(FAULTS)))


@st.composite
def reports(draw: st.DrawFn, dispatcher_id: str, count: int) -> RowReport:
    kinds = draw(st.lists(outcomes(dispatcher_id), min_size=1, max_size=3))
    durations = st.floats(0, 1_000, width=32)
    return RowReport(
        kinds,
        None if len(kinds) == 1 else np.array([draw(st.integers(0, len(kinds) - 1)) for _ in range(count)], np.int32),
        draw(durations) if draw(st.booleans()) else np.array([draw(durations) for _ in range(count)], np.float32),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chosen = draw(st.lists(selections(), min_size=1, max_size=4))
    codes = np.array(draw(st.lists(st.integers(0, len(chosen) - 1), max_size=8)), np.int32)
    parts: list[RowsDone] = []
    found: dict[tuple[int, str], Outcome] = {}
    for name in draw(st.permutations("abc")):
        rows = [row for row, code in enumerate(codes) if name in dict(chosen[code].targets)]
        # A dispatcher of several priorities works in several parts, one after the other.
        is_late = [draw(st.booleans()) for _ in rows] if draw(st.booleans()) else [False] * len(rows)
        for late in (False, True):
            some = [row for row, one in zip(rows, is_late, strict=True) if one is late]
            if not some:
                continue
            report = draw(reports(name, len(some)))
            is_all = len(some) == len(codes) and draw(st.booleans())
            parts.append(RowsDone(name, None if is_all else np.array(some, np.int64), report))
            numbers, durations = report.codes_of(len(some)), report.durations_of(len(some))
            for place, row in enumerate(some):
                found[row, name] = report.kinds[numbers[place]]._replace(duration_ms=float(durations[place]))
    by_row = [[found[row, name] for name, _ in chosen[code].targets] for row, code in enumerate(codes)]
    return Case(codes, RowDelivery(draw(st.sampled_from(["v1", ""])), chosen, draw(st.permutations(parts))), by_row)


def known(count: int) -> Known:
    texts = pa.array([f"{row}" for row in range(count)], pa.string())
    return Known(texts, texts, pa.nulls(count, pa.string()), texts, pa.nulls(count, pa.string()))


def expected(row: int, outcomes: list[Outcome], selection: Selection, table_version: str) -> dict[str, Any]:
    """A row of the ledger, made one by one."""
    if selection.fault is not None:
        status, error_code, error = selection.fault
    else:
        status = worst_status(outcomes)
        error_code, error = combined_error(outcomes, DispatchStatus(status))  # type: ignore[assignment]
    return {
        "row_id": str(row),
        "topic": str(row),
        "message_type": None,
        "status": status,
        "dispatchers": [
            {"id": one.dispatcher_id, "status": one.status, "attempts": one.attempts, "error_code": one.error_code}
            for one in outcomes
        ],
        "outputs": [output for one in outcomes for output in one.outputs],
        "error_code": error_code,
        "error": error,
        "attempts": max((one.attempts for one in outcomes), default=0),
        "duration_ms": max((one.duration_ms for one in outcomes), default=0.0),
        "correlation_id": str(row),
        "trace_id": None,
        "table_version": table_version or None,
    }


def columns_of(ddl: str) -> list[tuple[str, str]]:
    """Names and types, as they stand in it."""
    return [(name, kind) for name, kind in re.findall(r"(\w+) ([^ ]+?)(?:, |$)", ddl)]


@given(cases())
@settings(deadline=None, max_examples=200)
def test_a_ledger_says_of_every_row_what_its_outcomes_say(case: Case) -> None:
    ledger = ledger_of(known(len(case.codes)), case.codes, case.delivery)

    ledger.validate(full=True)
    assert ledger.schema == LEDGER
    assert ledger.to_pylist() == [
        expected(row, outcomes, case.delivery.selections[case.codes[row]], case.delivery.table_version)
        for row, outcomes in enumerate(case.by_row)
    ]


def test_the_error_code_is_that_of_the_first_of_the_worst_and_all_errors_are_told() -> None:
    ends = [
        Outcome("a", DispatchStatus.CIRCUIT_OPEN, error_code=ErrorCode.CIRCUIT_OPEN, error_message="refused"),
        Outcome("b", DispatchStatus.SUCCESS, attempts=1, outputs=("dev.b.events",)),
        Outcome("c", DispatchStatus.TIMEOUT, attempts=3, error_code=ErrorCode.TIME_LIMIT, error_message="too late"),
    ]
    selection = Selection((("c", "to-c"), ("b", "to-b"), ("a", "to-a")))
    delivery = RowDelivery("v1", [selection], [RowsDone(end.dispatcher_id, None, RowReport.alike(end)) for end in ends])

    (row,) = ledger_of(known(1), np.zeros(1, np.int32), delivery).to_pylist()

    assert (row["status"], row["error_code"], row["attempts"]) == ("timeout", "time_limit", 3)
    assert row["error"] == "c: too late; a: refused"
    assert [one["id"] for one in row["dispatchers"]] == ["c", "b", "a"]
    assert row["outputs"] == ["dev.b.events"]


def test_rows_without_errors_have_none() -> None:
    well = RowReport.alike(Outcome("a", DispatchStatus.SUCCESS, attempts=1, duration_ms=1.5))
    delivery = RowDelivery("v1", [Selection((("a", "to-a"),))], [RowsDone("a", None, well)])

    ledger = ledger_of(known(3), np.zeros(3, np.int32), delivery)

    assert ledger.column("error").null_count == ledger.column("error_code").null_count == 3
    assert ledger.column("duration_ms").to_pylist() == [1.5] * 3


def test_spark_and_arrow_name_the_same_columns_in_the_same_order() -> None:
    kinds = {"string": pa.string(), "int": pa.int32(), "double": pa.float64(), "array<string>": pa.list_(pa.string())}

    columns = columns_of(LEDGER_DDL)

    assert [name for name, _ in columns] == LEDGER.names
    assert {name: kinds.get(kind) for name, kind in columns if name != "dispatchers"} == {
        field.name: field.type for field in LEDGER if field.name != "dispatchers"
    }
    inner = dict(columns)["dispatchers"].removeprefix("array<struct<").removesuffix(">>")
    assert [(name, kinds[kind]) for name, kind in (one.split(":") for one in inner.split(","))] == [
        (field.name, field.type) for field in LEDGER.field("dispatchers").type.value_type
    ]
