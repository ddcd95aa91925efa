"""Processes killed while a DataFrame is being routed: every row ends, and its effect has happened.

A handler holds back all calls but the first until the kill has happened, so that rows are in flight at that moment.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.actors.helping import engine_of, kill, replica_pids, router_pids, wait_until
from tests.spark.helping import MARKS, rows_of

from raydispatch import Envelope
from raydispatch.actors import DispatchSystem

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = MARKS

ROWS = 300_000
PARTITIONS = 6
GATE_SECONDS = 60


class Tallies:
    """A batch handler that appends the numbers of its rows to a file, eight bytes each, and then waits at the gate."""

    def __init__(self, folder: Path) -> None:
        self.numbers = str(folder / "numbers")
        self.gate = str(folder / "gate")

    def __call__(self, table: pa.Table) -> None:
        done = pc.cast(table["payload"], pa.int64()).to_numpy().tobytes()
        file = os.open(self.numbers, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        os.write(file, done)
        os.close(file)
        deadline = monotonic() + GATE_SECONDS
        while not os.path.exists(self.gate) and monotonic() < deadline:
            sleep(0.01)  # In a process of its own, with a limit: the test opens the gate.

    def open(self) -> None:
        Path(self.gate).touch()

    @property
    def count(self) -> int:
        return os.path.getsize(self.numbers) // 8 if os.path.exists(self.numbers) else 0

    def missing(self) -> int:
        """How many numbers never came."""
        return ROWS - len(np.unique(np.fromfile(self.numbers, np.int64)))


@contextmanager
def striking(tallies: Tallies, strike: Callable[[], None]) -> Iterator[None]:
    """Strike when rows are in flight, while the block runs; then open the gate."""

    def run() -> None:
        try:
            wait_until(lambda: tallies.count > 0, GATE_SECONDS)
            strike()
        finally:
            tallies.open()

    with ThreadPoolExecutor(1) as executor:
        struck = executor.submit(run)
        yield
        struck.result()


def routed_with_a_strike(
    system: DispatchSystem, spark: Any, tallies: Tallies, folder: Path, strike: Callable[[], None]
) -> Any:
    df = spark.range(0, ROWS, 1, PARTITIONS).select(
        F.concat(F.lit("dev.order-"), F.col("id") % 100, F.lit(".events.v1")).alias("topic"),
        F.col("id").cast("string").alias("payload"),
        F.col("id").alias("message_id"),
    )
    with striking(tallies, strike):
        return system.route(df, ledger=folder / "ledger")


def check_all_done(report: Any, tallies: Tallies) -> None:
    assert report.counts == {"success": ROWS}
    assert report.verify() == (ROWS, ROWS, ROWS, {"success": ROWS})
    assert tallies.missing() == 0


def executor_pid(spark: Any) -> int:
    """The JVM that runs Spark's tasks: the parent of the daemon that is the parent of its Python workers."""

    def ancestor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            daemon = os.getppid()
            jvm = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
            yield pa.RecordBatch.from_pydict({"pid": [jvm] * batch.num_rows})

    return int(spark.range(1).mapInArrow(ancestor, "pid long").first()["pid"])


def test_a_killed_replica_costs_no_row(spark: Any, tmp_path: Path) -> None:
    tallies = Tallies(tmp_path)
    with DispatchSystem.start(engine_of("rows-replica", tallies, replicas=2, batch=True)) as system:
        pid = replica_pids(system)[0]

        report = routed_with_a_strike(system, spark, tallies, tmp_path, lambda: kill(pid))

    check_all_done(report, tallies)


def test_a_killed_router_costs_no_row(spark: Any, tmp_path: Path) -> None:
    tallies = Tallies(tmp_path)
    with DispatchSystem.start(engine_of("rows-router", tallies, replicas=2, batch=True)) as system:
        pid = router_pids(system)[0]

        report = routed_with_a_strike(system, spark, tallies, tmp_path, lambda: kill(pid))

    check_all_done(report, tallies)


def test_a_killed_spark_executor_costs_no_row(spark: Any, tmp_path: Path) -> None:
    tallies = Tallies(tmp_path)
    pid = executor_pid(spark)
    with DispatchSystem.start(engine_of("rows-executor", tallies, batch=True)) as system:
        report = routed_with_a_strike(system, spark, tallies, tmp_path, lambda: kill(pid))

    check_all_done(report, tallies)
    assert executor_pid(spark) != pid


def test_a_row_that_kills_its_replica_ends_alone(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "seen")

    async def deadly(envelope: Envelope[Any]) -> None:
        if envelope.payload == "7":
            os._exit(1)
        with open(path, "a") as file:  # noqa: ASYNC230
            file.write(f"{envelope.payload}\n")

    df = spark.range(0, 16, 1, 1).selectExpr("cast(id as string) as payload", "id as message_id")
    with DispatchSystem.start(engine_of("rows-deadly", deadly, replicas=2, breaker=None)) as system:
        report = system.route(df, topic=F.lit("dev.order.events.v1"), ledger=tmp_path / "ledger")

    rows = rows_of(report)
    assert {row_id for row_id, row in rows.items() if row["status"] != "success"} == {"7"}
    assert (rows["7"]["status"], rows["7"]["error_code"]) == ("dispatcher_error", "replica_lost")
    assert report.verify().recorded == 16
    assert set(Path(path).read_text().split()) == {str(number) for number in range(16)} - {"7"}


def test_a_million_rows_need_no_more_memory_than_a_few_batches(spark: Any, tmp_path: Path) -> None:
    def look(table: pa.Table) -> None:
        pc.sum(pc.binary_length(table["payload"]))

    topic = F.lit("dev.order.events.v1")
    df = spark.range(0, 1_000_000, 1, 8).select(F.rpad(F.col("id").cast("string"), 100, "x").alias("payload"))
    with DispatchSystem.start(engine_of("rows-million", look, replicas=2, batch=True)) as system:
        # What replicas have for good, such as the marks of their memory, they have after this.
        system.route(df.sample(0.5, seed=1), topic=topic, ledger=tmp_path / "first")
        pids = [*router_pids(system), *replica_pids(system)]
        before = sum(map(private_bytes, pids))

        report = system.route(df, topic=topic, ledger=tmp_path / "ledger")

        grown = sum(map(private_bytes, pids)) - before
    assert report.verify().counts == {"success": 1_000_000}
    # Some 20 bytes a row are remembered on purpose; the rows themselves are 130 MB.
    assert grown < 100_000_000


def private_bytes(pid: int) -> int:
    """Of a process, without what it shares in the object store."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
