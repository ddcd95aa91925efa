"""Reports of ledgers that Arrow reads; those that Spark reads are in test_route."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydispatch.errors import InvalidParameter, LedgerUnbalanced
from raydispatch.spark.ledger import LEDGER, LEDGER_FORMAT
from raydispatch.spark.report import ABOUT, Balance, RouteReport

IDENTITY = "0af76519-16cd-43dd-8448-eb211c80319c"


def row(row_id: str, status: str, *dispatchers: tuple[str, str, int, str | None], **columns: Any) -> dict[str, Any]:
    ends = [dict(zip(("id", "status", "attempts", "error_code"), one, strict=True)) for one in dispatchers]
    empty: dict[str, Any] = dict.fromkeys(LEDGER.names)
    known = {"row_id": row_id, "topic": "dev.order.events", "status": status, "dispatchers": ends, "outputs": []}
    last = {"duration_ms": 1.25, "correlation_id": IDENTITY, "table_version": "v1"}
    return {**empty, **known, **last, **columns}


GOOD = [row(f"good-{number}", "success", ("a", "success", 1, None)) for number in range(3)]
BAD = row(
    "bad", "dispatcher_error", ("a", "success", 1, None), ("b", "dispatcher_error", 3, "handler_exception"),
    message_type="Order", error_code="handler_exception", error="b: ConnectionError:\n  down",
    outputs=["dev.x", "dev.y"],
)  # fmt: skip
INVALID = row("invalid", "invalid_message", error_code="invalid_topic", error="it has no topic", topic=None)


def report_of(folder: Path, *rows: dict[str, Any], submitted: int | None = None, **options: Any) -> RouteReport:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), LEDGER), folder / "part-0.parquet")
    return RouteReport(None, str(folder), "job", submitted, **options)


# Asking


def test_the_most_frequent_status_comes_first(tmp_path: Path) -> None:
    report = report_of(tmp_path, INVALID, *GOOD, BAD, BAD)

    assert list(report.counts.items()) == [("success", 3), ("dispatcher_error", 2), ("invalid_message", 1)]


def test_a_row_is_explained_in_words(tmp_path: Path) -> None:
    report = report_of(tmp_path, *GOOD, BAD, INVALID)

    assert report.explain("bad").splitlines() == [
        "Row bad: dispatcher_error",
        "  topic dev.order.events, type Order",
        "  a: success after 1 try",
        "  b: dispatcher_error after 3 tries (handler_exception)",
        "  error handler_exception: b: ConnectionError:",
        "  down",
        "  sent on to dev.x, dev.y",
        f"  1.2 ms, correlation {IDENTITY}, table v1",
    ]
    assert report.explain("invalid").splitlines()[1:3] == [
        "  topic None, type None", "  error invalid_topic: it has no topic",
    ]  # fmt: skip
    assert report.explain("nobody") == "There is no row 'nobody' in the ledger."


def test_every_row_of_an_id_is_explained(tmp_path: Path) -> None:
    first, second = report_of(tmp_path, BAD, BAD).explain("bad").split("\n\n")

    assert first == second


# Verifying


def test_a_ledger_that_balances_says_what_agrees(tmp_path: Path) -> None:
    balance = report_of(tmp_path, *GOOD, BAD, BAD, submitted=5).verify()

    assert balance == Balance(5, 5, 4, {"success": 3, "dispatcher_error": 2})


def test_where_nobody_counted_the_ledger_does(tmp_path: Path) -> None:
    assert report_of(tmp_path, *GOOD).verify() == Balance(3, 3, 3, {"success": 3})


def test_all_that_does_not_balance_is_said(tmp_path: Path) -> None:
    rows = [row("1", "routed"), row("2", "success", ("a", "timeout", 1, None))]
    report = report_of(tmp_path, *rows, submitted=1_002)

    with pytest.raises(LedgerUnbalanced) as raised:
        report.verify()

    assert raised.value.faults == (
        "1,002 rows were submitted, and 2 are in the ledger",
        "1 rows have no end",
        "of 1 rows, the status does not fit what their dispatchers did",
    )
    assert str(raised.value) == f"The ledger in {tmp_path} does not balance: {'; '.join(raised.value.faults)}."


# Showing


def test_a_report_reads_as_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *GOOD, BAD, seconds=0.5)

    report.show()

    assert capsys.readouterr().out.splitlines() == [
        "4 rows in 0.5 s, 8 rows/s",
        "  success                        3    75.00%",
        "  dispatcher_error               1    25.00%",
        "           1 × handler_exception: b: ConnectionError: down",
        f"  ledger: {tmp_path}",
    ]


def test_where_all_is_well_no_errors_are_looked_for(tmp_path: Path) -> None:
    assert len(str(report_of(tmp_path, *GOOD)).splitlines()) == 3


def test_long_errors_are_cut(tmp_path: Path) -> None:
    report = report_of(tmp_path, {**BAD, "error": "x" * 200})

    assert f"handler_exception: {'x' * 99}…\n" in str(report)


def test_an_empty_ledger_can_be_shown(tmp_path: Path) -> None:
    assert str(report_of(tmp_path)).splitlines() == ["0 rows", f"  ledger: {tmp_path}"]


# Opening


def test_the_ledger_of_a_dataset_can_be_opened_later_without_spark(tmp_path: Path) -> None:
    report_of(tmp_path, *GOOD)
    (tmp_path / ABOUT).write_text(json.dumps({"format": LEDGER_FORMAT, "job_id": "job", "system": "orders"}))

    opened = RouteReport.open(None, tmp_path)

    assert (opened.job_id, opened.counts) == ("job", {"success": 3})
    with pytest.raises(InvalidParameter, match=r"There is no ledger in .*nowhere"):
        RouteReport.open(None, tmp_path / "nowhere")
