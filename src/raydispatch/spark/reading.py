"""Reading a ledger: by Spark, or, where there is none, by Arrow on this machine."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import InvalidParameter
from raydispatch.spark.ledger import LEDGER, LEDGER_DDL

if TYPE_CHECKING:
    from pyspark.sql import Column

TERMINAL = [status.value for status in DispatchStatus if status.is_terminal()]
DONE = ("success", "skipped")
"""The statuses that leave nothing to do."""


class Facts(NamedTuple):
    """What a ledger says of itself."""

    rows: int
    ids: int
    """Different row ids."""
    unended: int
    """Rows without a terminal status."""
    contradictory: int
    """Rows whose status does not fit what their dispatchers did."""


class Error(NamedTuple):
    """Rows that failed of the same thing."""

    rows: int
    code: str | None
    example: str | None


class LedgerReader(Protocol):
    """Answers questions about a ledger."""

    @property
    def frame(self) -> Any:
        """The ledger, as a DataFrame or a Dataset."""

    def failed(self) -> Any:
        """The rows that did not succeed, as the same."""

    def counts(self) -> dict[str, int]:
        """Rows by status."""

    def find(self, row_id: str) -> list[Mapping[str, Any]]:
        """The rows with this id."""

    def errors(self, most: int) -> list[Error]:
        """The most frequent errors."""

    def facts(self) -> Facts:
        """What must add up."""


class SparkReader:
    """By Spark, wherever the ledger is."""

    def __init__(self, spark: Any, path: str) -> None:
        self._spark = spark
        self._path = path

    @property
    def frame(self) -> Any:
        """A DataFrame."""
        return self._spark.read.schema(LEDGER_DDL).parquet(self._path)

    def failed(self) -> Any:
        """The rows that did not succeed."""
        from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

        return self.frame.where(~F.coalesce(F.col("status").isin(*DONE), F.lit(False)))

    def counts(self) -> dict[str, int]:
        """Rows by status."""
        return {row["status"]: row["count"] for row in self.frame.groupBy("status").count().collect()}

    def find(self, row_id: str) -> list[Mapping[str, Any]]:
        """The rows with this id."""
        frame = self.frame
        return [row.asDict(recursive=True) for row in frame.where(frame["row_id"] == row_id).collect()]

    def errors(self, most: int) -> list[Error]:
        """The most frequent errors."""
        from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

        count, example = F.count(F.lit(1)).alias("rows"), F.first("error").alias("example")
        grouped = self.failed().groupBy("error_code").agg(count, example).orderBy(F.desc("rows"), "error_code")
        return [Error(row["rows"], row["error_code"], row["example"]) for row in grouped.limit(most).collect()]

    def facts(self) -> Facts:
        """What must add up."""
        from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

        def number(condition: "Column") -> "Column":
            return F.sum(F.when(condition, 1).otherwise(0))

        bad = F.expr("size(filter(dispatchers, one -> one.status not in ('success', 'skipped')))")
        failed = F.col("status") == "dispatcher_error"
        found = self.frame.agg(
            F.count(F.lit(1)),
            F.countDistinct("row_id"),
            number(F.col("status").isNull() | ~F.col("status").isin(TERMINAL)),
            number(((F.col("status") == "success") & (bad > 0)) | (failed & (bad == 0) & (F.size("dispatchers") > 0))),
        ).collect()[0]
        return Facts(*(value or 0 for value in found))


class ArrowReader:
    """By Arrow, batch by batch: for ledgers of Ray Datasets, where there may be no Spark."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def frame(self) -> Any:
        """A Ray Dataset."""
        import ray

        # Ray's newer reader starts actors from its workers. One that has run a task of `from_spark` starts none: RayDP
        # leaves it set to send no classes along (load_code_from_local).
        context = ray.data.DataContext.get_current()
        newer = getattr(context, "use_datasource_v2", None)
        try:
            if newer:
                context.use_datasource_v2 = False
            return ray.data.read_parquet(self._path, file_extensions=["parquet"])
        finally:
            if newer:
                context.use_datasource_v2 = newer

    def failed(self) -> Any:
        """The rows that did not succeed."""
        return self.frame.map_batches(_failed, batch_format="pyarrow")

    def counts(self) -> dict[str, int]:
        """Rows by status."""
        found: Counter[str] = Counter()
        for batch in self._batches("status"):
            for one in pc.value_counts(batch["status"]).to_pylist():
                found[one["values"]] += one["counts"]
        return dict(found)

    def find(self, row_id: str) -> list[Mapping[str, Any]]:
        """The rows with this id."""
        rows: list[Mapping[str, Any]] = self._dataset().to_table(filter=pc.field("row_id") == row_id).to_pylist()
        return rows

    def errors(self, most: int) -> list[Error]:
        """The most frequent errors."""
        counts: Counter[str | None] = Counter()
        examples: dict[str | None, str | None] = {}
        for batch in self._batches("status", "error_code", "error"):
            for code, error in zip(
                *(_failed(batch)[name].to_pylist() for name in ("error_code", "error")), strict=True
            ):
                counts[code] += 1
                examples.setdefault(code, error)
        found = sorted(counts.items(), key=lambda one: (-one[1], one[0] or ""))
        return [Error(count, code, examples[code]) for code, count in found[:most]]

    def facts(self) -> Facts:
        """What must add up."""
        rows = unended = contradictory = 0
        ids: set[str] = set()
        for batch in self._batches("row_id", "status", "dispatchers"):
            rows += batch.num_rows
            ids.update(batch["row_id"].to_pylist())
            for status, dispatchers in zip(batch["status"].to_pylist(), batch["dispatchers"].to_pylist(), strict=True):
                unended += status not in TERMINAL
                bad = sum(one["status"] not in DONE for one in dispatchers)
                contradictory += bool(bad) if status == "success" else False
                contradictory += status == "dispatcher_error" and bool(dispatchers) and not bad
        return Facts(rows, len(ids), unended, contradictory)

    def _batches(self, *columns: str) -> Iterator[pa.RecordBatch]:
        return iter(self._dataset().to_batches(columns=list(columns)))

    def _dataset(self) -> Any:
        try:
            return pads.dataset(self._path, schema=LEDGER, format="parquet")
        except (OSError, pa.ArrowInvalid) as error:
            raise InvalidParameter(f"There is no ledger in {self._path}: {error}") from None


def _failed(batch: Any) -> Any:
    return batch.filter(pc.invert(pc.is_in(batch["status"], pa.array(DONE))))
