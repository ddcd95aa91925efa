"""Routing a DataFrame: Spark sends its rows through the system, and writes down what became of each."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import pyarrow as pa
import ray
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from raydispatch.errors import InvalidParameter
from raydispatch.settings import SystemSettings
from raydispatch.spark.files import Folder
from raydispatch.spark.frame import ONLY, Columns, message_frame, message_id_column
from raydispatch.spark.ledger import LEDGER_DDL, LEDGER_FORMAT
from raydispatch.spark.progress import Ask, OnProgress, run_job, told
from raydispatch.spark.push import Order, push
from raydispatch.spark.report import ABOUT, RouteReport
from raydispatch.spark.session import check_session

HOLD_SECONDS = 600.0
"""How long rows of an open dispatcher are held at most, with on_open="wait"."""

OnOpen = Literal["refuse", "wait"]

_OWN_ID, _ROW_ID, _DONE = "_raydispatch_own_id", "_raydispatch_row_id", "_raydispatch_done"


class Target(NamedTuple):
    """The system that rows are sent to, as a Spark worker must know it."""

    name: str
    settings: SystemSettings
    max_payload_bytes: int
    ask: Ask


def route(
    target: Target,
    df: DataFrame,
    columns: Columns,
    *,
    ledger: "str | Path | None" = None,
    job_id: str | None = None,
    resume: "str | Path | RouteReport | None" = None,
    on_open: OnOpen = "refuse",
    on_progress: OnProgress | None = None,
    overwrite: bool = False,
) -> RouteReport:
    """Send every row, and wait; see `DispatchSystem.route`."""
    if not isinstance(df, DataFrame):
        raise InvalidParameter(f"route takes a Spark DataFrame, not {type(df).__name__}.")
    check_on_open(on_open)
    spark = df.sparkSession
    check_session(spark)
    earlier = _earlier(spark, resume)
    job = job_id or (earlier.job_id if earlier else uuid4().hex)
    only: Column | None = None
    if earlier is not None:
        df, only = _unfinished(df, columns, earlier)
    frame = message_frame(df, columns, job, only)
    folder = _folder(spark, ledger)
    # Of a micro-batch, a ledger that was begun says that it ran before.
    is_repeat = earlier is not None or (folder.read(ABOUT) is not None if overwrite else job_id is not None)
    if overwrite:
        folder.remove()
    elif folder.has_parquet():
        raise InvalidParameter(f"There is a ledger in {folder.path} already: name another folder, or resume from it.")
    folder.write(ABOUT, {"format": LEDGER_FORMAT, "job_id": job, "system": target.name})
    order = Order(
        target.name, ray.get_runtime_context().gcs_address, target.settings, target.max_payload_bytes,
        HOLD_SECONDS if on_open == "wait" else 0.0, is_repeat, job if on_progress else None,
    )  # fmt: skip
    seen = Observation()
    started = perf_counter()
    ledgers = frame.observe(seen, F.count(F.lit(1)).alias("rows")).mapInArrow(_pushing(order), LEDGER_DDL)
    # Finished partitions stand in the folder at once, and outlive the driver.
    writer = ledgers.write.mode("append").option("mapreduce.fileoutputcommitter.algorithm.version", "2")
    with told(job, target.ask, on_progress):
        run_job(spark, job, lambda: writer.parquet(folder.path))
    is_unique = "row_id" not in frame.columns  # Made by us, that is, and not the rows' own.
    return RouteReport(spark, folder.path, job, int(seen.get["rows"]), perf_counter() - started, is_unique)


def check_on_open(on_open: str) -> None:
    """It is one of two words."""
    if on_open not in ("refuse", "wait"):
        raise InvalidParameter(f'on_open is "refuse" or "wait", not {on_open!r}.')


def _pushing(order: Order) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def pushing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        return push(order, batches, repeated=context is not None and context.attemptNumber() > 0)

    return pushing


def _earlier(spark: Any, resume: "str | Path | RouteReport | None") -> RouteReport | None:
    if resume is None or isinstance(resume, RouteReport):
        return resume
    return RouteReport.open(spark, resume)


def _unfinished(df: DataFrame, columns: Columns, earlier: RouteReport) -> tuple[DataFrame, Column]:
    """The rows that did not succeed or are not in the ledger, each with the dispatchers that failed."""
    failed = F.expr("filter(dispatchers, one -> one.status not in ('success', 'skipped'))")
    done = earlier.ledger.select(
        F.col("row_id").alias(_ROW_ID),
        F.col("status").isin("success", "skipped").alias(_DONE),
        # A row that reached nobody goes to all.
        F.when(F.size(failed) > 0, F.array_join(F.transform(failed, lambda one: one["id"]), "\n")).alias(ONLY),
    )
    # Rows that share an id are one message, for all the dispatchers that failed with any of them.
    to_all = F.max(F.col(ONLY).isNull() & ~F.col(_DONE))
    names = F.array_distinct(F.flatten(F.collect_list(F.split(ONLY, "\n"))))
    only = F.when(~to_all, F.array_join(F.array_sort(names), "\n"))
    done = done.groupBy(_ROW_ID).agg(F.min(_DONE).alias(_DONE), only.alias(ONLY))
    joined = df.withColumn(_OWN_ID, message_id_column(df, columns)).join(done, F.col(_OWN_ID) == F.col(_ROW_ID), "left")
    left = joined.where(~F.coalesce(F.col(_DONE), F.lit(False)))
    return left.drop(_OWN_ID, _ROW_ID, _DONE), F.col(ONLY)


def _folder(spark: Any, ledger: "str | Path | None") -> Folder:
    if ledger is None:
        if len([node for node in ray.nodes() if node["Alive"]]) > 1:
            raise InvalidParameter(
                "The Ray cluster has several nodes: name a folder that all of them share, with ledger=…"
            )
        ledger = Path(tempfile.gettempdir()) / "raydispatch-ledgers" / uuid4().hex
    return Folder(spark, str(ledger))
