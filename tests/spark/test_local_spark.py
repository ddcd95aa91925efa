"""Spark without RayDP: a session of one's own, in a process of its own, beside a Ray on the same machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spark.helping import environment

pytestmark = pytest.mark.slow

LOCAL = """
import sys
from pyspark.sql import SparkSession
from raydispatch import DispatchEngine, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.actors.java import use_java
from raydispatch.spark import spark_on_ray

engine = DispatchEngine("local")

@engine.dispatcher("orders", topics="dev.*.events", category=MessageCategory.EVENT, breaker=None, retry=None)
async def handle(envelope):
    if envelope.payload["number"] % 10 == 0:
        raise ConnectionError("down")

if __name__ == "__main__":
    use_java()
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    with local_ray(2), DispatchSystem.start(engine, routers=1) as system:
        with spark_on_ray(system, spark=session) as spark:
            df = spark.range(0, 1_000, 1, 2).selectExpr("'dev.order.events' as topic", "id as number")
            report = system.route(df, payload="*", ledger=sys.argv[1])
            print(spark is session, tuple(report.verify()))
        print(session.range(3).count())
        session.stop()
"""

LOST = """
import sys
from raydispatch.actors.connect import join
from raydispatch.errors import SystemUnavailable

try:
    join(sys.argv[1])
except SystemUnavailable as error:
    print(error)
"""


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr[-2_000:]
    return ended.stdout


def test_a_session_that_exists_already_is_used_and_left_running(tmp_path: Path) -> None:
    verified, counted = run(LOCAL, str(tmp_path / "ledger")).splitlines()[-2:]

    assert verified == "True (1000, 1000, 1000, {'success': 900, 'dispatcher_error': 100})"
    assert counted == "3"


def test_a_worker_that_cannot_reach_the_cluster_says_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"

        words = run(LOST, address)

    assert words.startswith(f"A Spark worker on {socket.gethostname()} cannot join the Ray cluster at {address} (")
    assert "Spark's workers must run on nodes of the Ray cluster: spark_on_ray() starts them there." in words
