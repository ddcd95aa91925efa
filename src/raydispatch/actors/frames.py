"""DataFrames, Datasets and streams: the verbs of a system for many rows at once."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from raydispatch.bus.engine import DispatchEngine
    from raydispatch.routing.table import RouteTable
    from raydispatch.spark.dry_run import DryRun
    from raydispatch.spark.frame import ColumnLike, DataFrame
    from raydispatch.spark.progress import OnProgress
    from raydispatch.spark.report import RouteReport
    from raydispatch.spark.routing import Target
    from raydispatch.spark.streaming import OnBatch, RoutedStream


class DataFrameVerbs:
    """What `DispatchSystem` can do with rows. Spark is imported when the first of these is called."""

    def _target(self) -> "Target":
        raise NotImplementedError

    def _table(self) -> "RouteTable":
        raise NotImplementedError

    def route(
        self,
        df: "DataFrame",
        *,
        topic: "ColumnLike" = None,
        message_type: "ColumnLike" = None,
        payload: "ColumnLike" = None,
        key: "ColumnLike" = None,
        correlation_id: "ColumnLike" = None,
        message_id: "ColumnLike" = None,
        traceparent: "ColumnLike" = None,
        ledger: "str | Path | None" = None,
        job_id: str | None = None,
        resume: "str | Path | RouteReport | None" = None,
        on_open: 'Literal["refuse", "wait"]' = "refuse",
        on_progress: "OnProgress | None" = None,
    ) -> "RouteReport":
        """Send every row of a Spark DataFrame to its dispatchers, and wait; the report has a ledger of all rows.

        Columns are given by name or as expressions; those that are not given are looked for by their own names.
        `payload="*"` is a struct of all other columns. The ledger is a parquet folder. `resume` takes the ledger of an
        earlier job, and sends only what did not succeed, to the dispatchers that failed. A `job_id` that was used
        before makes this a repeat: what dispatchers remember is not done again.
        """
        from raydispatch.spark.frame import Columns
        from raydispatch.spark.routing import route

        columns = Columns(topic, message_type, payload, key, correlation_id, message_id, traceparent)
        return route(
            self._target(), df, columns,
            ledger=ledger, job_id=job_id, resume=resume, on_open=on_open, on_progress=on_progress,
        )  # fmt: skip

    def route_dataset(
        self,
        ds: Any,
        *,
        topic: str | None = None,
        message_type: str | None = None,
        payload: str | None = None,
        key: str | None = None,
        correlation_id: str | None = None,
        message_id: str | None = None,
        traceparent: str | None = None,
        ledger: "str | Path | None" = None,
        job_id: str | None = None,
        on_open: 'Literal["refuse", "wait"]' = "refuse",
        on_progress: "OnProgress | None" = None,
    ) -> "RouteReport":
        """As `route`, for a Ray Dataset: one of `ray.data.from_spark(df)`, for instance. Columns are given by name."""
        from raydispatch.spark.dataset import route_dataset

        columns = {
            "topic": topic, "message_type": message_type, "payload": payload, "key": key,
            "correlation_id": correlation_id, "message_id": message_id, "traceparent": traceparent,
        }  # fmt: skip
        return route_dataset(
            self._target(), ds, columns, ledger=ledger, job_id=job_id, on_open=on_open, on_progress=on_progress
        )

    def route_stream(
        self,
        df: "DataFrame",
        *,
        checkpoint: "str | Path",
        topic: "ColumnLike" = None,
        message_type: "ColumnLike" = None,
        payload: "ColumnLike" = None,
        key: "ColumnLike" = None,
        correlation_id: "ColumnLike" = None,
        message_id: "ColumnLike" = None,
        traceparent: "ColumnLike" = None,
        ledger: "str | Path | None" = None,
        trigger: dict[str, Any] | None = None,
        on_open: 'Literal["refuse", "wait"]' = "refuse",
        on_batch: "OnBatch | None" = None,
    ) -> "RoutedStream":
        """Route a streaming DataFrame, micro-batch by micro-batch, in the background.

        Started again with the same checkpoint, after a stop or a crash, it goes on where it was: every row is in the
        ledger once. `trigger` is what Spark's own takes, such as `{"processingTime": "10 seconds"}`.
        """
        from raydispatch.spark.frame import Columns
        from raydispatch.spark.streaming import route_stream

        columns = Columns(topic, message_type, payload, key, correlation_id, message_id, traceparent)
        return route_stream(
            self._target(), df, columns,
            checkpoint=checkpoint, ledger=ledger, trigger=trigger, on_open=on_open, on_batch=on_batch,
        )  # fmt: skip

    def dry_run(
        self,
        df: "DataFrame",
        *,
        topic: "ColumnLike" = None,
        message_type: "ColumnLike" = None,
        against: "DispatchEngine | RouteTable | None" = None,
    ) -> "DryRun":
        """Where the rows of a DataFrame would go, and what another table would change. No dispatcher is called.

        A ledger is a DataFrame too: `dry_run(report.ledger, against=other)` compares what was done with what would be.
        """
        from raydispatch.spark.dry_run import dry_run
        from raydispatch.spark.frame import Columns

        return dry_run(self._table(), df, Columns(topic, message_type), against)
