"""Streams: a ledger for each micro-batch, and every row once, through stops, restarts and the death of the driver."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import ray
from tests.actors.helping import wait_until
from tests.spark.helping import EVENT, MARKS, Effects, environment, gated_recorder, recorder, table_recorder

from raydispatch import DispatchEngine
from raydispatch.actors import DispatchSystem
from raydispatch.errors import InvalidParameter

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = MARKS

TOPIC = "dev.stream.events"
NOW = {"availableNow": True}


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    return Effects(tmp_path_factory.mktemp("effects"))


@pytest.fixture(scope="module")
def system(ray_cluster: None, effects: Effects) -> Iterator[DispatchSystem]:
    engine = DispatchEngine("streams")
    engine.dispatcher("table", topics="*.table.events", category=EVENT, batch=True)(table_recorder(effects, "table"))
    engine.dispatcher("gated", topics="*.gated.events", category=EVENT)(gated_recorder(effects, "gated"))
    record = recorder(effects, "careful")
    engine.dispatcher("careful", topics="*.careful.events", category=EVENT, at_most_once=True)(record)
    with DispatchSystem.start(engine, routers=1) as running:
        yield running


def drop(folder: Path, topic: str, numbers: range) -> None:
    """A file of these numbers, which is there at once and whole."""
    folder.mkdir(exist_ok=True)
    texts = list(map(str, numbers))
    part = folder.parent / f"{numbers.start}.part"
    pq.write_table(pa.table({"topic": [topic] * len(texts), "payload": texts, "message_id": texts}), part)
    # Spark reads files in the order of their times, which may be equal for those that are made at once.
    moment = time() - 10_000 + numbers.start
    os.utime(part, (moment, moment))
    part.rename(folder / f"{numbers.start}.parquet")


def stream_of(spark: Any, folder: Path, files: int = 1) -> Any:
    schema = "topic string, payload string, message_id string"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", files).parquet(str(folder))


def ledger_numbers(folder: Path) -> Counter[int]:
    """How often each row is in the ledger, as Arrow reads it."""
    table = pads.dataset(folder, format="parquet", partitioning="hive").to_table(columns=["row_id", "status"])
    assert set(table["status"].to_pylist()) <= {"success"}
    return Counter(map(int, table["row_id"].to_pylist()))


def test_every_micro_batch_has_a_ledger_and_a_restart_goes_on_where_the_stream_was(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic, files, checkpoint, ledger = "dev.table.events", tmp_path / "in", tmp_path / "checkpoint", tmp_path / "ledger"
    reports: list[Any] = []
    words: dict[str, Any] = {"checkpoint": checkpoint, "ledger": ledger, "trigger": NOW, "on_batch": reports.append}
    drop(files, topic, range(100))
    drop(files, topic, range(100, 200))

    first = system.route_stream(stream_of(spark, files), **words)
    first.await_termination()
    drop(files, topic, range(200, 300))
    second = system.route_stream(stream_of(spark, files), **words)
    second.await_termination()

    batches = second.ledger.groupBy("batch_id").count().collect()
    assert {row["batch_id"]: row["count"] for row in batches} == {0: 100, 1: 100, 2: 100}
    assert [report.verify().recorded for report in reports] == [100, 100, 100]
    assert ledger_numbers(ledger) == Counter(range(300))
    assert Counter(map(int, effects.payloads("table", topic))) == Counter(range(300))


def test_a_stream_that_is_stopped_in_the_middle_of_a_batch_has_every_row_once(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    topic, files, checkpoint = "dev.gated.events", tmp_path / "in", tmp_path / "checkpoint"
    drop(files, topic, range(50))
    drop(files, topic, range(50, 100))

    stopped = system.route_stream(stream_of(spark, files, 2), checkpoint=checkpoint)
    wait_until(lambda: bool(effects.of("gated", topic)), 60)
    stopped.stop()
    try:
        # Else it could write to the ledger of the batch that is routed again.
        wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), 5)
    finally:
        effects.allow(topic)
    again = system.route_stream(stream_of(spark, files, 2), checkpoint=checkpoint, trigger=NOW)
    again.await_termination()

    assert again.ledger.count() == 100
    assert ledger_numbers(tmp_path / "checkpoint-ledger") == Counter(range(100))
    # What was under way is known to its dispatcher: it was waited for, and not done again.
    assert Counter(map(int, effects.payloads("gated", topic))) == Counter(range(100))


def test_a_dispatcher_that_runs_nothing_twice_gets_the_rows_of_a_stream(
    system: DispatchSystem, spark: Any, effects: Effects, tmp_path: Path
) -> None:
    drop(tmp_path / "in", "dev.careful.events", range(10))

    stream = system.route_stream(stream_of(spark, tmp_path / "in"), checkpoint=tmp_path / "checkpoint", trigger=NOW)
    stream.await_termination()

    assert {row["status"] for row in stream.ledger.collect()} == {"success"}
    assert len(effects.of("careful", "dev.careful.events")) == 10


def test_mistakes_are_said_in_sentences(system: DispatchSystem, spark: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="route_stream takes a streaming DataFrame"):
        system.route_stream(spark.range(1), checkpoint=tmp_path)
    with pytest.raises(InvalidParameter, match="checkpoint must name a folder"):
        system.route_stream(stream_of(spark, tmp_path), checkpoint=" ")


DRIVER = """
import os, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from raydispatch import DispatchEngine, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.actors.java import use_java

folder = sys.argv[1]
engine = DispatchEngine("mortal")

@engine.dispatcher("table", topics="dev.*.events", category=MessageCategory.EVENT, batch=True)
def handle(table):
    if "350" in table["payload"].to_pylist():
        Path(folder, "begun").touch()
        deadline = time.monotonic() + 60
        while not os.path.exists(os.path.join(folder, "gate")) and time.monotonic() < deadline:
            time.sleep(0.02)

if __name__ == "__main__":
    use_java()
    with local_ray(2), DispatchSystem.start(engine, routers=1) as system:
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        source = spark.readStream.schema("topic string, payload string, message_id string")
        stream = system.route_stream(
            source.option("maxFilesPerTrigger", 2).parquet(f"{folder}/in"), checkpoint=f"{folder}/checkpoint",
            ledger=f"{folder}/ledger", trigger={"availableNow": True},
        )
        stream.await_termination()
        spark.stop()
    print("done", flush=True)
"""


def test_a_stream_whose_driver_is_killed_has_every_row_once_after_a_restart(tmp_path: Path) -> None:
    # Two files make a batch of two partitions: of the second batch, one is written down, and the other one is held.
    for start in range(0, 600, 100):
        drop(tmp_path / "in", TOPIC, range(start, start + 100))
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)]
    half_written = tmp_path / "ledger" / "batch_id=1"

    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        wait_until(lambda: (tmp_path / "begun").exists() and any(half_written.glob("*.parquet")), 120)
        driver.kill()
    before = ledger_numbers(tmp_path / "ledger")
    (tmp_path / "gate").touch()
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)

    assert again.stdout.endswith("done\n"), again.stderr[-2_000:]
    assert before == Counter(range(300))
    assert ledger_numbers(tmp_path / "ledger") == Counter(range(600))
    assert sorted(os.listdir(tmp_path / "ledger")) == ["batch_id=0", "batch_id=1", "batch_id=2"]
