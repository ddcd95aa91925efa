import inspect
from typing import Any

import pytest

from raydispatch import DispatchEngine
from raydispatch.actors.frames import DataFrameVerbs
from raydispatch.actors.system import DispatchSystem


class Verbs(DataFrameVerbs):
    """The verbs of a system that is none."""

    def _target(self) -> Any:
        return "target"

    def _table(self) -> Any:
        return "table"


verbs: Any = Verbs()


class Calls:
    """Stands in for the functions of `raydispatch.spark`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(f"raydispatch.spark.{place}", self._called)

    def _called(self, *arguments: Any, **options: Any) -> str:
        self.arguments, self.options = arguments, options
        return "answer"


COLUMNS: dict[str, Any] = {
    "topic": "t", "message_type": "y", "payload": "p", "key": "k", "correlation_id": "c", "message_id": "m",
    "traceparent": "w",
}  # fmt: skip


def test_a_data_frame_is_routed_with_its_columns_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "routing.route")
    options: dict[str, Any] = {
        "ledger": "/l", "job_id": "j", "resume": "/r", "on_open": "wait", "on_progress": print,
    }  # fmt: skip

    assert verbs.route("frame", **COLUMNS, **options) == "answer"

    target, frame, columns = calls.arguments
    assert (target, frame, list(columns)) == ("target", "frame", list(COLUMNS.values()))
    assert calls.options == options


def test_a_dataset_is_routed_with_its_columns_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "dataset.route_dataset")
    options: dict[str, Any] = {"ledger": "/l", "job_id": "j", "on_open": "wait", "on_progress": print}

    verbs.route_dataset("dataset", **COLUMNS, **options)

    assert calls.arguments == ("target", "dataset", COLUMNS)
    assert calls.options == options


def test_a_stream_is_routed_with_its_columns_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "streaming.route_stream")
    options: dict[str, Any] = {
        "checkpoint": "/c", "ledger": "/l", "trigger": {"once": True}, "on_open": "wait", "on_batch": print,
    }  # fmt: skip

    verbs.route_stream("frame", **COLUMNS, **options)

    assert list(calls.arguments[2]) == list(COLUMNS.values())
    assert calls.options == options


def test_a_dry_run_asks_the_table_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "dry_run.dry_run")
    other = DispatchEngine("other")

    verbs.dry_run("frame", topic="t", message_type="y", against=other)

    table, frame, columns, against = calls.arguments
    assert (table, frame, columns.topic, columns.message_type, against) == ("table", "frame", "t", "y", other)


def test_what_is_not_given_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "routing.route")

    verbs.route("frame")

    assert set(calls.arguments[2]) == {None}
    assert calls.options == {
        "ledger": None, "job_id": None, "resume": None, "on_open": "refuse", "on_progress": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["route", "route_dataset", "route_stream", "dry_run"])
def test_a_system_has_these_verbs(name: str) -> None:
    assert inspect.getattr_static(DispatchSystem, name) is inspect.getattr_static(DataFrameVerbs, name)
    assert (inspect.getdoc(getattr(DispatchSystem, name)) or "").strip()


@pytest.mark.parametrize("part", ["_target", "_table"])
def test_without_a_system_there_is_nothing_to_route_to(part: str) -> None:
    with pytest.raises(NotImplementedError):
        getattr(DataFrameVerbs(), part)()
