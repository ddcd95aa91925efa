"""How far a job is: told by the workers to the controller, and shown while Spark works."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from raydispatch.errors import DispatchError

T = TypeVar("T")

OnProgress: TypeAlias = Callable[["dict[str, int]"], None]
"""Is told the rows so far, by status, twice a second. A task that runs again counts again: these are no accounts."""
Ask: TypeAlias = Callable[[str], "dict[str, int]"]
"""Asks the controller for the rows of a job."""

TELL_SECONDS = 0.5
CANCEL_SECONDS = 15.0
"""How long to wait for jobs that were cancelled; what is left of them ends with Spark."""


@contextmanager
def told(job_id: str, ask: Ask, on_progress: OnProgress | None) -> Iterator[None]:
    """Tell of the progress of a job while the block runs."""
    if on_progress is None:
        yield
        return
    over = threading.Event()

    def tell_now() -> None:
        # A controller that is away is no reason for a job to fail.
        with suppress(DispatchError):
            on_progress(ask(job_id))

    def tell() -> None:
        while not over.wait(TELL_SECONDS):
            tell_now()

    teller = threading.Thread(target=tell, name="raydispatch progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(5)
        tell_now()


def run_job(spark: Any, job_id: str, work: Callable[[], T]) -> T:
    """Do work with Spark as one group of jobs, which Ctrl-C cancels."""
    context = spark.sparkContext

    def grouped() -> T:
        before = context.getLocalProperty("spark.jobGroup.id"), context.getLocalProperty("spark.job.description")
        context.setJobGroup(job_id, f"raydispatch {job_id}", interruptOnCancel=True)
        try:
            return work()
        except BaseException:
            # A stream that is stopped ends this thread's call, and not the job: it would go on, and write.
            _end_group(context, job_id)
            raise
        finally:
            context.setLocalProperty("spark.jobGroup.id", before[0])
            context.setLocalProperty("spark.job.description", before[1])

    return interruptible(grouped, lambda: context.cancelJobGroup(job_id))


def _end_group(context: Any, job_id: str) -> None:
    """Cancel the jobs of a group, and wait until they have ended."""
    context.cancelJobGroup(job_id)
    tracker = context.statusTracker()
    deadline = monotonic() + CANCEL_SECONDS
    while monotonic() < deadline:
        infos = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(job_id)]
        if not any(info is not None and info.status == "RUNNING" for info in infos):
            return
        threading.Event().wait(0.05)


def interruptible(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Do work with Spark so that Ctrl-C cancels it, and is raised here.

    In the main thread it is done in another one: a call to Java that Ctrl-C breaks off leaves its connection, which
    belongs to a thread, with an answer that nobody reads. Every later call of that thread would wait for the job, the
    one that cancels it as well.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="raydispatch work", daemon=True).start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        cancel()
        wait([outcome], CANCEL_SECONDS)
        raise
