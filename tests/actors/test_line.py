import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError
from tests.actors.fakes import SETTINGS

from raydispatch.actors import line as module
from raydispatch.actors.line import Line
from raydispatch.actors.names import NAMESPACE, controller_name
from raydispatch.actors.rows import RowDelivery, RowKey, Shipment
from raydispatch.settings import SystemSettings

SHIPMENT = Shipment([RowKey("dev.order.events", None)], np.zeros(2, np.int32), ["content"], 5.0)


class FakeGateway:
    """Answers with what it is given, when it is allowed to; says in which thread it was asked."""

    def __init__(self, settings: SystemSettings, find: Callable[[], Any]) -> None:
        self.settings = settings
        self.find = find
        self.threads: list[str] = []
        self.sent: list[Shipment] = []
        self.both_are_here = asyncio.Event()
        self.error: Exception | None = None

    async def send_rows(self, shipment: Shipment) -> RowDelivery:
        self.threads.append(threading.current_thread().name)
        self.sent.append(shipment)
        if self.error is not None:
            raise self.error
        if len(self.sent) == 2:
            self.both_are_here.set()
        await self.both_are_here.wait()
        return RowDelivery(f"v{self.sent.index(shipment)}", [], [])


class FakeController:
    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, int]]] = []

    @property
    def note_rows(self) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *noted: self.noted.append(noted))})


@contextmanager
def running(line: Line) -> Iterator[Line]:
    """A line lives as long as its process; here, as long as a test."""
    (thread,) = (one for one in threading.enumerate() if one.name == "raydispatch orders")
    try:
        yield line
    finally:
        line._loop.call_soon_threadsafe(line._loop.stop)
        thread.join(10)
        line._loop.close()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(module, "Gateway", FakeGateway)
    with running(Line("orders", SETTINGS)) as made:
        yield made


def gateway_of(line: Line) -> FakeGateway:
    gateway: Any = line._gateway
    assert isinstance(gateway, FakeGateway)
    return gateway


def test_shipments_are_sent_at_once_by_a_thread_of_the_line(line: Line) -> None:
    other = SHIPMENT.again()

    answers = [line.send_rows(SHIPMENT), line.send_rows(other)]

    assert [answer.result(10).table_version for answer in answers] == ["v0", "v1"]
    gateway = gateway_of(line)
    assert gateway.sent == [SHIPMENT, other]
    assert gateway.threads == ["raydispatch orders"] * 2
    assert gateway.settings is SETTINGS


def test_what_the_gateway_raises_is_raised_to_who_waits(line: Line) -> None:
    gateway_of(line).error = ConnectionError("down")

    answer = line.send_rows(SHIPMENT)

    with pytest.raises(ConnectionError, match="down"):
        answer.result(10)


def test_routers_are_those_of_the_system(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_routers", lambda system: f"routers of {system}")

    assert gateway_of(line).find() == "routers of orders"


def test_a_system_that_was_started_again_under_its_name_gets_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> NoReturn:
        raise ActorDiedError

    async def delivered() -> RowDelivery:
        return RowDelivery("v2", [], [])

    old, new = (SimpleNamespace(route_rows=SimpleNamespace(remote=lambda _, do=do: do())) for do in (lost, delivered))
    found = [old, new]

    async def find(system: str) -> list[tuple[str, Any]]:
        return [("router/0", found.pop(0) if len(found) > 1 else found[0])]

    monkeypatch.setattr(module, "find_routers", find)
    with running(Line("orders", SETTINGS)) as line:
        answer = line.send_rows(SHIPMENT.within(2.0)).result(10)

    assert answer.table_version == "v2"


def test_progress_is_noted_at_the_controller(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = FakeController()
    actors = {(controller_name("orders"), NAMESPACE): controller}
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name, namespace])

    line.note("job", {"success": 2})

    assert controller.noted == [("job", {"success": 2})]


def test_nothing_is_noted_while_there_is_no_controller(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def nobody(name: str, namespace: str) -> NoReturn:
        asked.append(name)
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", nobody)

    line.note("job", {"success": 2})

    assert asked == [controller_name("orders")]
