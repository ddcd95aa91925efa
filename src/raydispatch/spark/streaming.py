"""Structured Streaming: every micro-batch is a job of its own, with a ledger that is written anew if it runs again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from raydispatch.errors import InvalidParameter
from raydispatch.spark.frame import Columns
from raydispatch.spark.ledger import LEDGER_DDL
from raydispatch.spark.report import RouteReport
from raydispatch.spark.routing import OnOpen, Target, route

OnBatch = Callable[[RouteReport], None]


class RoutedStream:
    """A stream that is being routed: the query of Spark, and the ledger of all micro-batches that have ended."""

    def __init__(self, query: Any, spark: Any, path: str) -> None:
        self.query = query
        """Spark's own: `awaitTermination`, `stop`, `lastProgress`, `exception` are there."""
        self._spark = spark
        self.path = path

    @property
    def ledger(self) -> DataFrame:
        """One row for each row so far; the column `batch_id` says in which micro-batch it came."""
        return self._spark.read.schema(f"{LEDGER_DDL}, batch_id bigint").parquet(self.path)

    def stop(self) -> None:
        """End the query; the same checkpoint goes on where it was."""
        self.query.stop()

    def await_termination(self, seconds: float | None = None) -> bool:
        """Wait for its end, for so long; raises what it failed of."""
        return bool(self.query.awaitTermination(seconds)) if seconds is not None else self._wait()

    def _wait(self) -> bool:
        self.query.awaitTermination()
        return True


def route_stream(
    target: Target,
    df: DataFrame,
    columns: Columns,
    *,
    checkpoint: "str | Path",
    ledger: "str | Path | None" = None,
    trigger: "dict[str, Any] | None" = None,
    on_open: OnOpen = "refuse",
    on_batch: OnBatch | None = None,
) -> RoutedStream:
    """Begin to route a stream; see `DispatchSystem.route_stream`."""
    if not isinstance(df, DataFrame) or not df.isStreaming:
        raise InvalidParameter("route_stream takes a streaming DataFrame, such as spark.readStream makes; see route.")
    if not str(checkpoint).strip():
        raise InvalidParameter("checkpoint must name a folder: what was read is written down there.")
    folder = str(ledger) if ledger is not None else f"{str(checkpoint).rstrip('/')}-ledger"

    def one(batch: DataFrame, batch_id: int) -> None:
        # The query's id is kept in the checkpoint: after a restart, the same batch has the same job id, so that
        # dispatchers recognize what they remember; and its ledger takes the place of a half-written one.
        query_id = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        report = route(
            target, batch, columns,
            ledger=f"{folder}/batch_id={batch_id}", job_id=f"{query_id}-{batch_id}", on_open=on_open, overwrite=True,
        )  # fmt: skip
        if on_batch is not None:
            on_batch(report)

    writer = df.writeStream.foreachBatch(one).option("checkpointLocation", str(checkpoint))
    query = (writer.trigger(**trigger) if trigger else writer).start()
    return RoutedStream(query, df.sparkSession, folder)
