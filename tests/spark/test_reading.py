from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.spark.helping import MARKS

from raydispatch.errors import InvalidParameter
from raydispatch.spark.ledger import LEDGER
from raydispatch.spark.reading import ArrowReader, Error, Facts, LedgerReader, SparkReader

ON_RAY = [
    *MARKS,
    # Ray Data's own: it sets what it has deprecated.
    pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning"),
]

DOWN = {"error_code": "handler_exception", "error": "a: ConnectionError: down"}
LATE = {"error_code": "time_limit", "error": "a: too late"}


def row(row_id: str, status: str | None, *dispatchers: str, **columns: Any) -> dict[str, Any]:
    """Of a ledger; dispatchers "a", "b" and so on ended in these ways."""
    ends = [
        {"id": name, "status": end, "attempts": 1, "error_code": None}
        for name, end in zip("abc", dispatchers, strict=False)
    ]
    empty: dict[str, Any] = dict.fromkeys(LEDGER.names)
    known = {"row_id": row_id, "topic": "dev.order.events", "status": status, "dispatchers": ends, "outputs": []}
    return {**empty, **known, "attempts": 1, "duration_ms": 1.0, **columns}


def write(folder: Path, *files: Iterable[dict[str, Any]]) -> str:
    """A ledger of these files, with what Spark and we leave beside them."""
    folder.mkdir()
    for number, rows in enumerate(files):
        pq.write_table(pa.Table.from_pylist(list(rows), LEDGER), folder / f"part-{number}.parquet")
    (folder / "_raydispatch.json").write_text("{}")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").write_bytes(b"crc")
    return str(folder)


@pytest.fixture
def path(tmp_path: Path) -> str:
    first = [row("1", "success", "success", "skipped"), row("2", "dispatcher_error", "dispatcher_error", **DOWN)]
    second = [
        row("3", "dispatcher_error", "success", "dispatcher_error", **DOWN),
        row("4", "timeout", "timeout", **LATE),
        row("5", "skipped", "skipped"),
    ]
    return write(tmp_path / "ledger", first, second)


@pytest.fixture
def tampered(tmp_path: Path) -> str:
    """Of six rows, two have no end and two contradict themselves; two share an id."""
    return write(
        tmp_path / "tampered",
        [
            row("1", "success", "success"),
            row("1", "success", "success", "timeout"),
            row("2", "dispatcher_error", "success", "skipped"),
            row("3", "dispatcher_error", error_code="replica_lost", error="no router"),
            row("4", "routed", "success"),
            row("5", None),
        ],
    )


def test_rows_are_counted_by_status(path: str) -> None:
    assert ArrowReader(path).counts() == {"success": 1, "dispatcher_error": 2, "timeout": 1, "skipped": 1}


def test_rows_are_found_by_id(path: str) -> None:
    reader = ArrowReader(path)

    (found,) = reader.find("3")

    assert found == row("3", "dispatcher_error", "success", "dispatcher_error", **DOWN)
    assert reader.find("6") == []


def test_the_most_frequent_errors_come_first(path: str) -> None:
    reader = ArrowReader(path)

    assert reader.errors(5) == [
        Error(2, DOWN["error_code"], DOWN["error"]),
        Error(1, LATE["error_code"], LATE["error"]),
    ]
    assert reader.errors(1) == [Error(2, DOWN["error_code"], DOWN["error"])]


def test_a_good_ledger_has_no_bad_facts(path: str) -> None:
    assert ArrowReader(path).facts() == Facts(rows=5, ids=5, unended=0, contradictory=0)


def test_rows_without_an_end_and_rows_that_contradict_themselves_are_counted(tampered: str) -> None:
    assert ArrowReader(tampered).facts() == Facts(rows=6, ids=5, unended=2, contradictory=2)


def test_an_empty_ledger_has_nothing_to_say(tmp_path: Path) -> None:
    reader = ArrowReader(write(tmp_path / "ledger"))

    assert reader.counts() == {}
    assert reader.facts() == Facts(0, 0, 0, 0)
    assert reader.errors(5) == []


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"There is no ledger in .*nowhere"):
        ArrowReader(str(tmp_path / "nowhere")).counts()


def test_errors_as_frequent_as_one_another_come_in_the_order_of_their_codes(tmp_path: Path) -> None:
    rows = [row("1", "timeout", **LATE), row("2", "dispatcher_error", **DOWN), row("3", "rejected")]

    reader = ArrowReader(write(tmp_path / "ledger", rows))

    assert [error.code for error in reader.errors(5)] == [None, DOWN["error_code"], LATE["error_code"]]


class TestSpark:
    pytestmark = ON_RAY

    def test_spark_and_arrow_read_the_same(self, spark: Any, path: str, tampered: str) -> None:
        def said(reader: LedgerReader) -> list[Any]:
            return [reader.counts(), reader.find("3"), reader.find("6"), reader.errors(5), reader.facts()]

        assert said(SparkReader(spark, path)) == said(ArrowReader(path))
        assert SparkReader(spark, tampered).counts() == ArrowReader(tampered).counts()
        assert SparkReader(spark, tampered).facts() == ArrowReader(tampered).facts()
        assert sorted(one["row_id"] for one in SparkReader(spark, path).failed().collect()) == ["2", "3", "4"]

    def test_a_row_without_a_status_did_not_succeed(self, spark: Any, tampered: str) -> None:
        assert "5" in {one["row_id"] for one in SparkReader(spark, tampered).failed().collect()}
