"""`raydispatch submit`: the rows of a file through a system, each with its entry in a ledger."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch.bus.engine import DispatchEngine
from raydispatch.cli.app import Json, load_engine
from raydispatch.cli.bar import Rows, bar
from raydispatch.cli.source import Format, format_of, has_spark, is_local, read, row_count
from raydispatch.cli.summary import Preview, Summary
from raydispatch.errors import InvalidParameter, MissingExtra, SystemUnavailable

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem
    from raydispatch.spark.dry_run import DryRun

T = TypeVar("T")

CPUS_BESIDE_SPARK = 2
INTERRUPTED = 130


class OnOpen(StrEnum):
    """What becomes of rows whose dispatcher has an open circuit."""

    REFUSE = "refuse"
    WAIT = "wait"


def _column(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-column", help=what, metavar="COLUMN", show_default=False, rich_help_panel="Columns")


def _spark(what: str, **limits: Any) -> Any:
    return typer.Option(help=what, rich_help_panel="Spark", **limits)


def submit(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A file of parquet, JSON lines or CSV, or a folder of such files.", metavar="FILE")
    ],
    app: Annotated[
        str | None,
        typer.Option(
            help="The engine to start for this job: MODULE:ENGINE, such as shop.orders:engine.",
            envvar="RAYDISPATCH_APP",
            metavar="MODULE:ENGINE",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Or the system to use, that `deploy` has started.", metavar="NAME")
    ] = None,
    written_as: Annotated[
        Format | None, typer.Option("--format", help="How the rows are written.", show_default="by suffix")
    ] = None,
    topic: Annotated[str | None, _column("topic", "The topic of each row; else the column `topic`.")] = None,
    message_type: Annotated[str | None, _column("type", "Its message type; else `message_type`, or none.")] = None,
    payload: Annotated[
        str | None, _column("payload", "Its payload; else `payload`, or all other columns together.")
    ] = None,
    key: Annotated[str | None, _column("key", "Rows of the same key go one after the other.")] = None,
    message_id: Annotated[str | None, _column("message-id", "Its own id, which --resume needs.")] = None,
    correlation_id: Annotated[str | None, _column("correlation-id", "Its correlation id, a UUID.")] = None,
    ledger: Annotated[
        str | None,
        typer.Option(help="Where to write what became of each row.", metavar="FOLDER", show_default="a temporary one"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Send only what did not succeed by this ledger.", metavar="FOLDER")
    ] = None,
    on_open: Annotated[OnOpen, typer.Option(help="Rows of an open circuit: refuse them, or wait.")] = OnOpen.REFUSE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell where the rows would go.")] = False,
    as_json: Json = False,
    executors: Annotated[int, _spark("Executors of Spark.", min=1)] = 1,
    cores: Annotated[int, _spark("Cores of each.", min=1)] = 2,
    memory: Annotated[str, _spark("Memory of each.")] = "1g",
) -> None:
    """Send every row of a file to its dispatchers, and write down what became of each.

    The exit code is 0 if all rows succeeded, 1 if some did not, 2 for a mistake, 130 after Ctrl-C. CSV has a header,
    one row a line, and all its values are text. Ray is the cluster that RAY_ADDRESS names, or the one of this machine,
    or one of its own for the time of the job.

    For example: raydispatch submit events.parquet --app shop.orders:engine --ledger out/
    """
    source_of_app = context.get_parameter_source("app")
    if system is not None and source_of_app is not None and source_of_app.name == "ENVIRONMENT":
        app = None
    job = Job(
        source, format_of(source, written_as), _Columns(topic, message_type, payload, key, correlation_id, message_id),
        ledger, resume, on_open, executors, cores, memory,
    )  # fmt: skip
    _check(app, system, job, dry_run)
    engine = load_engine(app) if app is not None else None
    if not has_spark():
        raise MissingExtra("Spark on Ray", "spark")
    rows = Rows()
    try:
        work = _look if dry_run else _send
        succeeded = work(job, engine, system, rows, as_json)
    except KeyboardInterrupt:
        _tell_of_the_end(job, rows)
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if succeeded else 1)


class _Columns(NamedTuple):
    """Which column is what, by the names that `route` has for them."""

    topic: str | None
    message_type: str | None
    payload: str | None
    key: str | None
    correlation_id: str | None
    message_id: str | None


class Job(NamedTuple):
    """What is to be done."""

    source: str
    written_as: Format
    columns: _Columns
    ledger: str | None
    resume: str | None
    on_open: OnOpen
    executors: int
    cores: int
    memory: str

    @property
    def cpus(self) -> int:
        """Of Ray: for Spark, and for what runs beside it."""
        return self.executors * self.cores + CPUS_BESIDE_SPARK


def _check(app: str | None, system: str | None, job: Job, dry_run: bool) -> None:
    """What can be seen before Ray and Spark are started, which takes some seconds."""
    if (app is None) == (system is None):
        raise InvalidParameter(
            "Name either an engine, --app MODULE:ENGINE, or a system that was deployed, --system NAME"
            f"{'.' if app is None else ': not both.'}"
        )
    if dry_run and (job.ledger is not None or job.resume is not None):
        raise InvalidParameter("A dry run sends nothing: it has no --ledger, and nothing to --resume.")
    if job.ledger is not None and is_local(job.ledger):
        if any(Path(job.ledger).glob("*.parquet")):
            raise InvalidParameter(f"There is a ledger in {job.ledger} already: name another folder.")
        if Path(job.ledger).is_file():
            raise InvalidParameter(f"The ledger must be a folder, and {job.ledger} is a file.")
    if job.resume is not None and is_local(job.resume) and not Path(job.resume).is_dir():
        raise InvalidParameter(f"There is no ledger in {job.resume}.")


def _send(job: Job, engine: DispatchEngine | None, name: str | None, rows: Rows, as_json: bool) -> bool:
    with ExitStack() as stack:
        steps = stack.enter_context(_steps())
        stack.enter_context(_on_ray(job, name, steps))
        system = stack.enter_context(_running(engine, name, steps))
        spark = stack.enter_context(_spark_of(job, steps))
        summary = _interruptible(spark, lambda: _routed(job, system, spark, rows, steps))
        print(json.dumps(summary.as_data(), indent=2)) if as_json else summary.show(Console())
        return summary.all_succeeded


def _routed(job: Job, system: "DispatchSystem", spark: Any, rows: Rows, steps: Console) -> Summary:
    with steps.status(f"reading {escape(job.source)}"):
        df = read(spark, job.source, job.written_as)
        # How many rows are left to do, nobody knows before.
        total = row_count(job.source, job.written_as) if job.resume is None else None
    payload = job.columns.payload or (None if "payload" in df.columns else "*")
    with bar(steps, rows, total) as tell:
        report = system.route(
            df, **job.columns._replace(payload=payload)._asdict(),
            ledger=job.ledger, resume=job.resume, on_open=job.on_open.value, on_progress=tell,
        )  # fmt: skip
    with steps.status("reading the ledger"):
        return Summary(report)


def _look(job: Job, engine: DispatchEngine | None, name: str | None, rows: Rows, as_json: bool) -> bool:
    """The dry run. An engine need not be started for it: its table says everything."""
    with ExitStack() as stack:
        steps = stack.enter_context(_steps())
        stack.enter_context(_on_ray(job, name, steps))
        target = engine if engine is not None else stack.enter_context(_running(None, name, steps))
        spark = stack.enter_context(_spark_of(job, steps))
        with steps.status(f"reading {escape(job.source)}"):
            found = _interruptible(spark, lambda: _matched(job, target, spark))
        print(json.dumps(found.as_data(), indent=2)) if as_json else found.show(Console())
        return found.all_routed


def _matched(job: Job, target: "DispatchEngine | DispatchSystem", spark: Any) -> Preview:
    df = read(spark, job.source, job.written_as)
    return Preview(_dry_run(target, df, job.columns))


def _dry_run(target: "DispatchEngine | DispatchSystem", df: Any, columns: _Columns) -> "DryRun":
    if not isinstance(target, DispatchEngine):
        return target.dry_run(df, topic=columns.topic, message_type=columns.message_type)
    from raydispatch.spark.dry_run import dry_run
    from raydispatch.spark.frame import Columns

    return dry_run(target.freeze(), df, Columns(topic=columns.topic, message_type=columns.message_type))


@contextmanager
def _steps() -> Iterator[Console]:
    """Where the steps are shown: stderr, also while that is led elsewhere."""
    with os.fdopen(os.dup(2), "w") as stderr:
        yield Console(file=stderr)


@contextmanager
def _on_ray(job: Job, name: str | None, steps: Console) -> Iterator[None]:
    """The cluster that RAY_ADDRESS names or that runs here; where an engine is to be started, else one of our own."""
    # Here, not above: Ray takes a second to load, and a mistake shows without it.
    from raydispatch.actors.connect import connect, local_ray

    with ExitStack() as stack:
        with steps.status("starting Ray"):
            try:
                connect()
            except SystemUnavailable:
                if name is not None or os.environ.get("RAY_ADDRESS", "local") != "local":
                    raise
                stack.enter_context(local_ray(num_cpus=job.cpus))
        yield


@contextmanager
def _running(engine: DispatchEngine | None, name: str | None, steps: Console) -> Iterator["DispatchSystem"]:
    """The system: started for this job, or found."""
    from raydispatch.actors.system import DispatchSystem

    if engine is None:
        with DispatchSystem.attach(name or "") as found:
            yield found
        return
    with steps.status(f"starting '{escape(engine.name)}' on Ray"):
        system = DispatchSystem.start(engine)
    try:
        yield system
    except BaseException:
        # Whoever stops a job does not want to wait for the rest of it.
        system.stop(seconds=0)
        raise
    system.stop()


@contextmanager
def _spark_of(job: Job, steps: Console) -> Iterator[Any]:
    from raydispatch.spark import spark_on_ray

    with ExitStack() as stack:
        with steps.status("starting Spark on Ray"):
            session = spark_on_ray(executors=job.executors, cores=job.cores, memory=job.memory)
            spark = stack.enter_context(session)
        yield spark


def _interruptible(spark: Any, work: Callable[[], T]) -> T:
    from raydispatch.spark.progress import interruptible

    return interruptible(work, spark.sparkContext.cancelAllJobs)


def _tell_of_the_end(job: Job, rows: Rows) -> None:
    where = f" What is done is in the ledger {job.ledger}." if job.ledger and rows.done else ""
    Console(stderr=True).print(
        f"Stopped early, after {rows.done:,} rows; everything that this command started is gone.{where}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
