import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from raydispatch.spark import progress
from raydispatch.spark.progress import interruptible, run_job, told


class FakeContext:
    """Spark's: writes down what it is told, and which group a thread's jobs are of."""

    def __init__(self) -> None:
        self.properties: dict[str, str | None] = {}
        self.groups: list[tuple[str, str, bool]] = []
        self.cancelled = threading.Event()
        self.cancelled_groups: list[str] = []
        self.statuses: list[str] = []
        """Of the first job, as it is asked for; the last one first."""

    @property
    def sparkContext(self) -> "FakeContext":  # noqa: N802 - as Spark calls it
        """It is its own session, too."""
        return self

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        self.groups.append((group, description, interruptOnCancel))
        self.setLocalProperty("spark.jobGroup.id", group)
        self.setLocalProperty("spark.job.description", description)

    def setLocalProperty(self, name: str, value: str | None) -> None:  # noqa: N802
        self.properties[name] = value

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        return self.properties.get(name)

    def statusTracker(self) -> "FakeContext":  # noqa: N802
        return self

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802
        return [1, 2]

    def getJobInfo(self, number: int) -> SimpleNamespace | None:  # noqa: N802
        """Of the second job, nothing is known any more."""
        return SimpleNamespace(status=self.statuses.pop()) if number == 1 and self.statuses else None

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        self.cancelled_groups.append(group)
        self.cancelled.set()


class BrokenOff(Future[Any]):
    """Whoever waits for it is interrupted."""

    def result(self, timeout: float | None = None) -> NoReturn:
        raise KeyboardInterrupt


def fail() -> NoReturn:
    raise ConnectionError("down")


# Telling


def test_progress_is_told_while_the_block_runs_and_once_more_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    heard: list[dict[str, int]] = []
    was_told = threading.Event()

    def ask(job_id: str) -> dict[str, int]:
        asked.append(job_id)
        return {"success": len(asked)}

    def on_progress(counts: dict[str, int]) -> None:
        heard.append(counts)
        was_told.set()

    monkeypatch.setattr(progress, "TELL_SECONDS", 0.001)

    with told("job", ask, on_progress):
        assert was_told.wait(10)
        during = len(heard)

    assert during >= 1
    assert len(heard) > during
    assert heard == [{"success": number + 1} for number in range(len(heard))]
    assert set(asked) == {"job"}


def test_a_job_that_fails_is_told_of_up_to_its_end() -> None:
    heard: list[dict[str, int]] = []

    with pytest.raises(ConnectionError, match="down"), told("job", lambda job_id: {"success": 3}, heard.append):
        fail()

    assert heard == [{"success": 3}]


def test_nobody_is_asked_when_nobody_listens() -> None:
    asked: list[str] = []

    with told("job", lambda job_id: asked.append(job_id) or {}, None):  # type: ignore[func-returns-value]
        pass

    assert asked == []


# Ctrl-C


def test_work_is_one_group_of_jobs_and_nothing_of_it_is_left_behind() -> None:
    context = FakeContext()

    found = run_job(context, "job", lambda: dict(context.properties))

    assert found["spark.jobGroup.id"] == "job"
    assert context.groups == [("job", "raydispatch job", True)]
    assert set(context.properties.values()) == {None}
    assert context.cancelled_groups == []


def test_what_work_raises_is_raised_and_ends_its_group() -> None:
    context = FakeContext()
    context.setLocalProperty("spark.jobGroup.id", "outer")

    with pytest.raises(ConnectionError, match="down"):
        run_job(context, "job", fail)

    assert context.properties["spark.jobGroup.id"] == "outer"
    assert context.cancelled_groups == ["job"]


def test_work_that_failed_is_over_when_its_jobs_have_ended() -> None:
    context = FakeContext()
    context.statuses = ["never asked for", "FAILED", "RUNNING", "RUNNING"]

    with pytest.raises(ConnectionError, match="down"):
        run_job(context, "job", fail)

    assert context.statuses == ["never asked for"]


def test_ctrl_c_cancels_the_jobs_and_waits_for_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext()
    ended: list[bool] = []
    monkeypatch.setattr(progress, "Future", BrokenOff)

    with pytest.raises(KeyboardInterrupt):
        run_job(context, "job", lambda: ended.append(context.cancelled.wait(10)))

    assert context.cancelled_groups == ["job"]
    assert ended == [True]


def test_jobs_that_do_not_end_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(progress, "Future", BrokenOff)
    monkeypatch.setattr(progress, "CANCEL_SECONDS", 0.01)

    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: release.wait(10), lambda: None)

    assert not release.is_set()
    release.set()


def test_in_the_main_thread_work_is_done_in_another_one() -> None:
    assert interruptible(threading.current_thread, lambda: None) is not threading.main_thread()


def test_in_any_other_thread_it_is_done_there() -> None:
    def story() -> bool:
        return interruptible(threading.current_thread, lambda: None) is threading.current_thread()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(story).result()
