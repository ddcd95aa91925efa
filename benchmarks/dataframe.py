"""DataFrames on Ray: against the limit that Spark sets, Ray Data, Spark alone, and themselves with more rows."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from pydantic import BaseModel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from raydp.spark import release_spark_recoverable

from _charts import Column, write_chart
from _dataframe_peers import Matching, by_regexes, orders, yielding_constants
from harness import Bar, Prepare, Work, measure, median_ratio, run
from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.actors.java import use_java
from raydispatch.spark import spark_on_ray
from raydispatch.spark.ledger import LEDGER_DDL

RESULTS = Path(__file__).resolve().parent / "results"
TOPICS = 1_000
PARTITION_ROWS = 1_000_000
MATCHED = "topic string, routes array<int>, size int"


class Amounts(NamedTuple):
    """How much is measured."""

    rounds: int
    rows: int
    slow_rows: int
    """Of the peer that matches row by row."""
    few: int
    many: int


QUICK = Amounts(rounds=2, rows=1_000_000, slow_rows=20_000, few=500_000, many=2_500_000)
FULL = Amounts(rounds=5, rows=2_000_000, slow_rows=50_000, few=1_000_000, many=5_000_000)


class Order(BaseModel):
    """Five fields, as a payload has them."""

    number: int
    customer: str
    amount: float
    currency: str
    note: str


def bars(quick: bool) -> Iterator[Bar]:
    amounts = QUICK if quick else FULL
    use_java()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raydispatch-bench-")))
        stack.enter_context(local_ray(num_cpus=8))
        system = stack.enter_context(DispatchSystem.start(engine(), routers=2))
        spark = stack.enter_context(spark_on_ray(system, cores=2, memory="4g"))
        frames = Frames(spark, folder)
        yield from throughput(system, frames, folder, amounts)
        yield from growth(system, frames, folder, amounts)
        yield from dry(system, frames, amounts)


def engine() -> DispatchEngine:
    made = DispatchEngine("dataframe")
    topics = [f"dev.area-{number}.events.*" for number in range(TOPICS)]
    made.dispatcher("orders", topics=topics, category=MessageCategory.EVENT, batch=True, replicas=2)(orders)
    made.dispatcher("typed", topics="*.typed.commands.*", category=MessageCategory.COMMAND, replicas=2)(typed)
    return made


async def typed(envelope: Envelope[Order]) -> None:
    pass


class Frames:
    """Rows on disk, made once for each number of them."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self._folder = folder

    def of(self, rows: int) -> DataFrame:
        """Topic, type, 100 bytes."""
        number = F.col("id")
        topic = F.concat(F.lit("dev.area-"), (number % TOPICS).cast("string"), F.lit(".events.v1"))
        payload = F.rpad(F.concat(number.cast("string"), F.expr("uuid()")), 100, "x")
        return self._kept(f"rows-{rows}", rows, topic, payload)

    def typed(self, rows: int) -> DataFrame:
        """The same for the typed dispatcher: JSON of five fields, and about 100 bytes."""
        number = F.col("id")
        fields = [
            number.alias("number"), F.concat(F.lit("customer-"), number % 1_000).alias("customer"),
            (number / 100).alias("amount"), F.lit("EUR").alias("currency"), F.lit("as always, please").alias("note"),
        ]  # fmt: skip
        return self._kept(f"typed-{rows}", rows, F.lit("dev.typed.commands.v1"), F.to_json(F.struct(*fields)))

    def _kept(self, name: str, rows: int, topic: Any, payload: Any) -> DataFrame:
        path = str(self._folder / name)
        if not Path(path).exists():
            partitions = max(2, -(-rows // PARTITION_ROWS))
            columns = [topic.alias("topic"), F.lit("Order").alias("message_type"), payload.alias("payload")]
            self.spark.range(0, rows, 1, partitions).select(*columns).write.parquet(path)
        return self.spark.read.parquet(path)


def throughput(system: DispatchSystem, frames: Frames, folder: Path, amounts: Amounts) -> Iterator[Bar]:
    rows, spark = frames.of(amounts.rows), frames.spark
    table = system._front.table
    hashed = rows.select("*", *(F.xxhash64(F.lit(seed), "topic", "payload").alias(f"hash_{seed}") for seed in (1, 2)))
    pulling = Matching(table)
    patterns = [re.escape(f"dev.area-{number}.events.") + "[^.]+" for number in range(TOPICS)]

    def pull(path: str) -> None:
        ds = ray.data.from_spark(hashed).map_batches(pulling, batch_format="pyarrow", batch_size=50_000)
        write(ds.to_spark(spark), path)
        release_spark_recoverable(hashed)  # Else the executor keeps all rows of every round, until it has no memory.

    routing = into(folder, amounts.rows, lambda path: system.route(rows, ledger=path), check)
    few = amounts.rows // 4
    validating = into(folder, few, lambda path: system.route(frames.typed(few), ledger=path), check)
    seconds = measure(
        {
            "ours": routing,
            "typed": validating,
            "limit": into(
                folder, amounts.rows, lambda path: write(rows.mapInArrow(yielding_constants, LEDGER_DDL), path)
            ),
            "pull": into(folder, amounts.rows, pull),
            "regexes": into(
                folder,
                amounts.slow_rows,
                lambda path: write(
                    frames.of(amounts.slow_rows).mapInPandas(
                        by_regexes(patterns), "topic string, routes array<int>, size int"
                    ),
                    path,
                ),
            ),
        },
        amounts.rounds + 1,
    )
    for prepare in (routing, validating):
        prepare(0)  # So that the last round is looked at, too.
    # The first round warms up: workers start, Java compiles.
    ours, typed_, limit, pull_, regexes = (values[1:] for values in seconds.values())
    yield rates("route(df), batch handler: rows/s against a constant ledger (the limit)", "limit", ours, limit, 0.45)
    yield rates("route(df), batch handler: rows/s against from_spark, map_batches, to_spark", "pull", ours, pull_, 1.5)
    yield rates("route(df), batch handler: rows/s against regexes row by row in Spark", "regexes", ours, regexes, 30)
    yield rates("route(df), a handler for each message, validated: against the limit", "typed", typed_, limit, 0.15)


def growth(system: DispatchSystem, frames: Frames, folder: Path, amounts: Amounts) -> Iterator[Bar]:
    times, memory = {}, {}
    for rows in (amounts.few, amounts.many):
        df = frames.of(rows)
        work = into(folder, rows, lambda path, df=df: system.route(df, ledger=path), check)  # type: ignore[misc]
        times[rows] = median(value * rows for value in measure({"it": work}, 3)["it"])
        memory[rows] = private_bytes(system)
    yield Bar(
        f"{amounts.few:,} → {amounts.many:,} rows: time", times[amounts.many] / times[amounts.few], 5.5, "lower", "x"
    )
    flat = memory[amounts.many] / memory[amounts.few]
    yield Bar(f"{amounts.few:,} → {amounts.many:,} rows: memory of the actors", flat, 1.2, "lower", "x")


def dry(system: DispatchSystem, frames: Frames, amounts: Amounts) -> Iterator[Bar]:
    df = frames.of(amounts.many)

    def count(_: int) -> Work:
        return Work(lambda: df.groupBy("topic", "message_type").count().collect(), amounts.many)

    def look(_: int) -> Work:
        return Work(lambda: system.dry_run(df).counts, amounts.many)

    seconds = measure({"ours": look, "group": count}, amounts.rounds + 1)
    ours, group = (values[1:] for values in seconds.values())
    yield rates("dry run: rows/s against groupBy(topic, type).count()", "dry-run", ours, group, 0.5)


def into(
    folder: Path, rows: int, work: Callable[[str], Any], look: Callable[[Any, int], None] = lambda *_: None
) -> Prepare:
    """Each time into an empty folder. What was done is looked at before the next one begins, and not in its time."""
    path = str(folder / f"out-{uuid4().hex}")
    done: list[Any] = []

    def prepare(_: int) -> Work:
        while done:
            look(done.pop(), rows)
        shutil.rmtree(path, ignore_errors=True)
        return Work(lambda: done.append(work(path)), rows)

    return prepare


def write(df: DataFrame, path: str) -> None:
    df.write.mode("append").option("mapreduce.fileoutputcommitter.algorithm.version", "2").parquet(path)


def check(report: Any, rows: int) -> None:
    """Nobody wins by dropping some."""
    assert report.counts == {"success": rows}, report.counts


def private_bytes(system: DispatchSystem) -> int:
    """Of all actors, without what they share in the object store."""
    status = system.status()
    pids = [one.pid for one in status.routers]
    pids += [replica.pid for one in status.dispatchers.values() for replica in one.replicas]
    return sum(_private(pid) for pid in pids if pid)


def _private(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def rates(name: str, slug: str, ours: list[float], peer: list[float], bar: float) -> Bar:
    columns = [Column("raydispatch", 1 / median(ours), True), Column("the other", 1 / median(peer), False)]
    write_chart(
        RESULTS / f"dataframe-{slug}.svg", name, "rows/s", columns, bar * columns[1].value, f"the bar: ≥ {bar:g} x"
    )
    return Bar(name, median_ratio(peer, ours), bar, "higher", "x")


if __name__ == "__main__":
    run("DataFrames", bars)
