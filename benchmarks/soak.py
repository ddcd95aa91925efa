"""Ten million rows through a 1 GB object store and a 2 GB executor: no spill, no failure, memory bounded."""

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter

import ray
from pyspark.sql import functions as F
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from _dataframe_peers import orders
from dataframe import private_bytes
from raydispatch import DispatchEngine, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.java import use_java
from raydispatch.spark import spark_on_ray

STORE_BYTES = 1_000_000_000
MOST_GROWTH = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    use_java()
    ray.init(
        address="local", num_cpus=8, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR", namespace="raydispatch",
    )  # fmt: skip
    engine = DispatchEngine("soak")
    engine.dispatcher("orders", topics="dev.*.events.*", category=MessageCategory.EVENT, batch=True, replicas=2)(orders)
    with (
        tempfile.TemporaryDirectory(prefix="raydispatch-soak-") as folder,
        DispatchSystem.start(engine) as system,
        spark_on_ray(system, memory="2g") as spark,
    ):
        number = F.col("id")
        topic = F.concat(F.lit("dev.area-"), (number % 1_000).cast("string"), F.lit(".events.v1"))
        payload = F.rpad(number.cast("string"), 100, "x")
        df = spark.range(0, rows, 1, max(2, rows // 200_000)).select(topic.alias("topic"), payload.alias("payload"))
        system.route(df.limit(200_000), ledger=Path(folder) / "warm")
        first, peak, over = private_bytes(system), [0], threading.Event()

        def watch() -> None:
            while not over.wait(1):
                peak[0] = max(peak[0], private_bytes(system))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        started = perf_counter()
        report = system.route(df, ledger=Path(folder) / "ledger")
        seconds = perf_counter() - started
        over.set()
        watching.join()
        balance, spilled = report.verify(), spilled_bytes()
    ray.shutdown()
    growth = peak[0] / first
    print(f"{balance.recorded:,} rows in {seconds:.0f} s, {balance.counts}")
    print(f"spilled: {spilled:,} bytes; memory of the actors: {growth:.2f} x of what they had after 200,000 rows")
    sys.exit(0 if balance.counts == {"success": rows} and spilled == 0 and growth < MOST_GROWTH else 1)


def spilled_bytes() -> int:
    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.spilled_bytes_total)


if __name__ == "__main__":
    main()
