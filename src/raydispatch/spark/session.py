"""Spark on the Ray cluster: a session through RayDP, with what it needs to run there."""

import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from raydispatch.errors import InvalidParameter, InvalidState, MissingExtra, SystemUnavailable

# Ray's Java serializer looks into these; without them the first use kills RayDP's app master, on any Java above 11.
_OPENED = (
    "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.math", "java.text",
    "java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic", "sun.nio.ch", "sun.nio.cs",
    "sun.security.action", "sun.util.calendar",
)  # fmt: skip
_JAVA_KEYS = (
    "spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions", "spark.ray.raydp_app_master.extraJavaOptions",
)  # fmt: skip
_JAVA_OPTIONS = " ".join(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED)

BATCH_ROWS = 50_000
"""Rows that Spark hands to a Python worker at a time: with fewer, calls cost more than what they carry."""

DEFAULTS: Mapping[str, str] = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS),
    "spark.sql.session.timeZone": "UTC",
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def spark_on_ray(
    system: object = None,
    *,
    spark: Any = None,
    executors: int = 1,
    cores: int = 2,
    memory: str = "1g",
    name: str | None = None,
    config: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """A Spark session whose executors run on the Ray cluster; it ends with the block.

    Or, with `spark=`, a session that you have already: it is checked, and left running.

    Example: `with spark_on_ray(system) as spark: report = system.route(spark.read.parquet("events/"))`.
    """
    if spark is not None:
        check_session(spark)
        yield spark
        return
    _check_amounts(executors, cores)
    try:
        import raydp
    except ImportError:
        raise MissingExtra("Spark on Ray", "spark") from None
    import ray

    from raydispatch.actors.connect import use_ray
    from raydispatch.actors.java import use_java

    use_ray()
    use_java()
    _check_cpus(ray.available_resources(), executors, cores)
    settings = {
        **DEFAULTS,
        "spark.sql.shuffle.partitions": str(2 * executors * cores),
        # Workers find the modules that this process finds.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **dict.fromkeys(_JAVA_KEYS, _JAVA_OPTIONS),
        **(config or {}),
    }
    # RayDP has an actor of this name: with a fixed one, a second Spark on the cluster would be refused.
    name = name or f"raydispatch-{uuid4().hex[:8]}"
    try:
        with hushed(), _own_interrupts(), _this_python():
            session = raydp.init_spark(name, executors, cores, memory, configs=settings)
            session.sparkContext.setLogLevel("ERROR")
    except Exception as error:
        raydp.stop_spark()
        raise SystemUnavailable(f"Spark could not be started on Ray: {type(error).__name__}: {error}") from error
    try:
        yield session
    finally:
        raydp.stop_spark()


def check_session(spark: Any) -> None:
    """Warn of what makes a job of a foreign session go wrong."""
    if getattr(spark, "sparkContext", None) is None:
        raise InvalidParameter(
            f"{type(spark).__name__} is no Spark session of this process (Spark Connect has no RDDs)."
        )
    if spark.sparkContext.getConf().get("spark.speculation", "false").lower() == "true":
        warnings.warn(
            "This Spark session has speculative execution on: it runs slow tasks twice, and dispatchers only recognize "
            "messages that they still remember. Switch spark.speculation off.",
            stacklevel=3,
        )


def _check_amounts(executors: int, cores: int) -> None:
    for name, value in (("executors", executors), ("cores", cores)):
        if not isinstance(value, int) or value < 1:
            raise InvalidParameter(f"{name} must be a number above 0, not {value!r}.")


def _check_cpus(free: Mapping[str, float], executors: int, cores: int) -> None:
    """With too few, Spark would wait for its executors for ever, and say nothing."""
    wanted, there = executors * cores, free.get("CPU", 0)
    if there < wanted:
        raise InvalidState(
            f"Spark needs {wanted} free CPUs of the Ray cluster ({executors} executors of {cores} cores), and "
            f"{there:g} are free: ask for fewer, or start Ray with more (ray.init(num_cpus=…) may be above what the "
            "machine has)."
        )


@contextmanager
def _this_python() -> Iterator[None]:
    """Executors run the Python of this process."""
    wanted = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Spark takes Ctrl-C over when it starts, to call Java from within a call to Java, which fails: take it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def hushed() -> Iterator[None]:
    """What is started in this block writes to a file for as long as it lives. If the block fails, that is shown."""
    with tempfile.TemporaryFile() as noise:
        try:
            with _written_to(noise.fileno()):
                yield
        except Exception:
            noise.seek(0)
            sys.stderr.write(noise.read().decode(errors="replace"))
            raise


@contextmanager
def _written_to(file: int) -> Iterator[None]:
    """Java inherits the numbers 1 and 2, whatever `sys.stdout` is."""
    kept = {number: os.dup(number) for number in (1, 2)}
    _flush()
    try:
        for number in kept:
            os.dup2(file, number)
        yield
    finally:
        _flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
