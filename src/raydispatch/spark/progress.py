"""How far a job is: told by the workers to the controller, and shown while Spark works."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

OnProgress: TypeAlias = Callable[["dict[str, int]"], None]
"""Is told the rows so far, by status, twice a second. A task that runs again counts again: these are no accounts."""
Ask: TypeAlias = Callable[[str], "dict[str, int]"]
"""Asks the controller for the rows of a job."""

TELL_SECONDS = 0.5


@contextmanager
def told(job_id: str, ask: Ask, on_progress: OnProgress | None) -> Iterator[None]:
    """Tell of the progress of a job while the block runs."""
    if on_progress is None:
        yield
        return
    over = threading.Event()

    def tell() -> None:
        while not over.wait(TELL_SECONDS):
            on_progress(ask(job_id))

    teller = threading.Thread(target=tell, name="raydispatch progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(5)
        on_progress(ask(job_id))


@contextmanager
def as_job(spark: Any, job_id: str) -> Iterator[None]:
    """What Spark does in this block is one group of jobs, and ends with it: also if it is left by Ctrl-C."""
    context = spark.sparkContext
    context.setJobGroup(job_id, f"raydispatch {job_id}", interruptOnCancel=True)
    try:
        yield
    except BaseException:
        context.cancelJobGroup(job_id)
        raise
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
        context.setLocalProperty("spark.job.description", None)
