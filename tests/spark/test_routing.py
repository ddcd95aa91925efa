"""Which rows a job that is resumed sends, and where its ledger goes; whole jobs are in test_route."""

from pathlib import Path
from typing import Any

import pytest
import ray
from tests.spark.helping import MARKS

from raydispatch.errors import InvalidParameter
from raydispatch.spark import routing
from raydispatch.spark.frame import Columns
from raydispatch.spark.ledger import LEDGER_DDL
from raydispatch.spark.report import RouteReport


def ledger_of(spark: Any, folder: Path, *rows: tuple[str, str, list[tuple[str, str]]]) -> RouteReport:
    """A ledger by hand: row id, status, and how its dispatchers ended."""
    names = [name.split()[0] for name in LEDGER_DDL.replace("array<struct<", "").split(", ")]
    known = [
        {"row_id": row_id, "status": status, "dispatchers": [(name, end, 1, None) for name, end in dispatchers]}
        for row_id, status, dispatchers in rows
    ]
    spark.createDataFrame([tuple(row.get(name) for name in names) for row in known], LEDGER_DDL).write.parquet(
        str(folder / "ledger")
    )
    return RouteReport(spark, str(folder / "ledger"), "job")


def unfinished(spark: Any, earlier: RouteReport, *numbers: int) -> list[tuple[int, str | None]]:
    """The rows that are left of these, each with the dispatchers that it is for."""
    df = spark.createDataFrame([(number,) for number in numbers], "number int")
    left, only = routing._unfinished(df, Columns(message_id="number"), earlier)
    return sorted((row["number"], row["for"]) for row in left.select("number", only.alias("for")).collect())


# Folders


def test_a_cluster_of_several_nodes_needs_a_folder_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])

    with pytest.raises(
        InvalidParameter, match="The Ray cluster has several nodes: name a folder that all of them share"
    ):
        routing._folder(None, None)


class TestSpark:
    pytestmark = MARKS

    def test_a_cluster_of_one_node_has_a_folder_of_its_own_for_each_job(
        self, spark: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])

        one, other = (routing._folder(spark, None).path for _ in range(2))

        assert one != other
        assert "/raydispatch-ledgers/" in one

    # Resuming

    def test_rows_that_are_done_are_left_out_and_those_that_are_not_in_the_ledger_stay(
        self, spark: Any, tmp_path: Path
    ) -> None:
        earlier = ledger_of(
            spark, tmp_path, ("1", "success", [("a", "success")]), ("2", "skipped", [("a", "skipped")]),
            ("9", "success", [("a", "success")]),
        )  # fmt: skip

        assert unfinished(spark, earlier, 1, 2, 3) == [(3, None)]

    def test_rows_that_failed_are_for_those_that_failed(self, spark: Any, tmp_path: Path) -> None:
        earlier = ledger_of(
            spark, tmp_path,
            ("1", "dispatcher_error", [("a", "success"), ("b", "dispatcher_error"), ("c", "circuit_open")]),
            ("2", "timeout", [("a", "timeout"), ("b", "skipped")]),
        )  # fmt: skip

        assert unfinished(spark, earlier, 1, 2) == [(1, "b\nc"), (2, "a")]

    def test_rows_that_reached_nobody_are_for_all(self, spark: Any, tmp_path: Path) -> None:
        earlier = ledger_of(spark, tmp_path, ("1", "no_dispatcher", []), ("2", "invalid_message", []))

        assert unfinished(spark, earlier, 1, 2) == [(1, None), (2, None)]

    def test_the_columns_of_a_row_are_as_they_were(self, spark: Any, tmp_path: Path) -> None:
        earlier = ledger_of(spark, tmp_path, ("1", "success", []))
        df = spark.createDataFrame([("1", "x"), ("2", "y")], "message_id string, row_id string")

        left, _ = routing._unfinished(df, Columns(), earlier)

        assert left.select("message_id", "row_id").collect() == [("2", "y")]

    def test_rows_that_share_an_id_are_as_many_as_they_were(self, spark: Any, tmp_path: Path) -> None:
        failed = ("1", "dispatcher_error", [("a", "dispatcher_error")])
        earlier = ledger_of(spark, tmp_path, failed, failed)

        assert unfinished(spark, earlier, 1, 1) == [(1, "a"), (1, "a")]

    def test_rows_that_share_an_id_are_for_all_that_failed_of_any_of_them(self, spark: Any, tmp_path: Path) -> None:
        earlier = ledger_of(
            spark, tmp_path,
            ("1", "timeout", [("a", "timeout"), ("b", "success")]),
            ("1", "timeout", [("a", "success"), ("b", "timeout")]),
            ("2", "timeout", [("a", "timeout")]), ("2", "no_dispatcher", []),
        )  # fmt: skip

        assert unfinished(spark, earlier, 1, 2) == [(1, "a\nb"), (2, None)]
