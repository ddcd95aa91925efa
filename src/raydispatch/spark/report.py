"""The report of a job: its ledger, and what can be asked of it."""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import InvalidParameter, LedgerUnbalanced
from raydispatch.spark.files import Folder
from raydispatch.spark.ledger import LEDGER_DDL, LEDGER_FORMAT

_TERMINAL = [status.value for status in DispatchStatus if status.is_terminal()]


class Balance(NamedTuple):
    """What `verify` has found to agree."""

    submitted: int
    """Rows that Spark has read, as it counted them itself."""
    recorded: int
    """Rows of the ledger."""
    distinct: int
    """Row ids of the ledger."""
    counts: dict[str, int]


class RouteReport:
    """What became of a job. The ledger is a parquet folder: reading it, as often as you like, sends nothing.

    Example: `report.counts == {"success": 9_990, "invalid_message": 10}`.
    """

    def __init__(
        self, spark: Any, path: str, job_id: str, submitted: int | None = None, seconds: float | None = None
    ) -> None:
        self._spark = spark
        self.path = path
        """Where the ledger is."""
        self.job_id = job_id
        self.submitted = submitted
        """Rows that were read; None of a ledger that was opened later."""
        self.seconds = seconds
        """How long the job took."""

    @classmethod
    def open(cls, spark: Any, path: "str | Path") -> "RouteReport":
        """A ledger that was written before, by this process or another one, even if that one died meanwhile."""
        folder = Folder(spark, str(path))
        about = folder.read("_raydispatch.json")
        if about is None:
            raise InvalidParameter(f"There is no ledger in {folder.path}.")
        if about["format"] != LEDGER_FORMAT:
            raise InvalidParameter(f"The ledger in {folder.path} has format {about['format']}, not {LEDGER_FORMAT}.")
        return cls(spark, folder.path, about["job_id"])

    @property
    def ledger(self) -> DataFrame:
        """One row for each row submitted."""
        return self._spark.read.schema(LEDGER_DDL).parquet(self.path)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows ended how."""
        rows = self.ledger.groupBy("status").count().collect()
        return {row["status"]: row["count"] for row in sorted(rows, key=lambda row: -row["count"])}

    def failed(self) -> DataFrame:
        """The rows that did not succeed."""
        return self.ledger.where(~F.col("status").isin("success", "skipped"))

    def explain(self, row_id: str) -> str:
        """What became of one row, in words."""
        rows = self.ledger.where(F.col("row_id") == str(row_id)).collect()
        if not rows:
            return f"There is no row '{row_id}' in the ledger."
        return "\n\n".join(_explained(row) for row in rows)

    def verify(self) -> Balance:
        """Prove that every row is in the ledger once, with an end; raises `LedgerUnbalanced` if not."""
        found = self.ledger.agg(
            F.count(F.lit(1)).alias("rows"),
            F.countDistinct("row_id").alias("ids"),
            F.sum(F.when(~F.col("status").isin(_TERMINAL) | F.col("status").isNull(), 1).otherwise(0)).alias("open"),
            F.sum(F.when(_contradicts(), 1).otherwise(0)).alias("wrong"),
        ).collect()[0]
        balance = Balance(
            found["rows"] if self.submitted is None else self.submitted, found["rows"], found["ids"], self.counts
        )
        faults = []
        if balance.submitted != balance.recorded or sum(self.counts.values()) != balance.recorded:
            faults.append(f"{balance.submitted:,} rows were submitted, and {balance.recorded:,} are in the ledger")
        if found["open"]:
            faults.append(f"{found['open']:,} rows have no end")
        if found["wrong"]:
            faults.append(f"of {found['wrong']:,} rows, the status does not fit what their dispatchers did")
        if faults:
            raise LedgerUnbalanced(self.path, tuple(faults))
        return balance

    def show(self) -> None:
        """Print a summary."""
        print(self)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        rate = f", {total / self.seconds:,.0f} rows/s" if self.seconds else ""
        took = f" in {self.seconds:.1f} s{rate}" if self.seconds else ""
        lines = [f"{total:,} rows{took}"]
        lines += [f"  {status:<18}{count:>14,}  {count / total:7.2%}" for status, count in self.counts.items()]
        for error in self._errors():
            lines.append(f"  {error['count']:>10,} × {error['error_code']}: {_short(error['error'])}")
        return "\n".join([*lines, f"  ledger: {self.path}"])

    def _errors(self) -> list[Any]:
        """The most frequent errors."""
        if set(self.counts) <= {"success", "skipped"}:
            return []
        grouped = (
            self.failed().groupBy("error_code").agg(F.count(F.lit(1)).alias("count"), F.first("error").alias("error"))
        )
        found: list[Any] = grouped.orderBy(F.desc("count")).limit(5).collect()
        return found


def _contradicts() -> Any:
    """A success, of which a dispatcher failed; or a failure of dispatchers, none of which did."""
    bad = F.expr("size(filter(dispatchers, one -> one.status not in ('success', 'skipped')))")
    return ((F.col("status") == "success") & (bad > 0)) | ((F.col("status") == "dispatcher_error") & (bad == 0))


def _explained(row: Any) -> str:
    lines = [f"Row {row['row_id']}: {row['status']}", f"  topic {row['topic']}, type {row['message_type']}"]
    lines += [
        f"  {one['id']}: {one['status']} after {one['attempts']} "
        f"{'try' if one['attempts'] == 1 else 'tries'}{' (' + one['error_code'] + ')' if one['error_code'] else ''}"
        for one in row["dispatchers"]
    ]
    if row["error"]:
        lines.append(f"  error {row['error_code']}: {row['error']}")
    if row["outputs"]:
        lines.append(f"  sent on to {', '.join(row['outputs'])}")
    lines.append(f"  {row['duration_ms']:.1f} ms, correlation {row['correlation_id']}, table {row['table_version']}")
    return "\n".join(lines)


def _short(text: str | None, most: int = 100) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
