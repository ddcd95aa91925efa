from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from raydispatch.dispatch.handler import Handler, HandlerSource, PayloadMisfit
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.testing.handlers import RecordingHandler
from raydispatch.testing.wrapping import wrapped


class OrderPlaced(BaseModel):
    order_id: int


class Diary:
    """Notes what happens around a handler."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def before(self, envelope: Envelope[Any]) -> Iterator[float]:
        self.notes.append("before")
        yield 3

    def after(self, envelope: Envelope[Any]) -> None:
        self.notes.append("after")

    async def sleep(self, seconds: float) -> None:
        self.notes.append(f"sleep {seconds}")

    def sleep_in_thread(self, seconds: float) -> None:
        self.notes.append(f"sleep {seconds} in thread")


IN_LOOP = ["before", "sleep 3", "after"]
IN_THREAD = ["before", "sleep 3 in thread", "after"]


async def bill(envelope: Envelope[OrderPlaced]) -> str:
    return f"{envelope.payload.order_id}.events"


def bill_now(envelope: Envelope[OrderPlaced]) -> str:
    return f"{envelope.payload.order_id}.events"


async def bill_by(currency: str, envelope: Envelope[OrderPlaced]) -> str:
    return f"{envelope.payload.order_id}.events"


class Caller:
    async def __call__(self, envelope: Envelope[OrderPlaced]) -> str:
        return await bill(envelope)


class Billing:
    """Bills."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def start(self) -> None:
        self.steps.append("start")

    async def stop(self) -> None:
        self.steps.append("stop")

    def health(self) -> bool:
        return "sick" not in self.steps

    async def handle(self, envelope: Envelope[OrderPlaced]) -> str:
        self.steps.append("handle")
        return await bill(envelope)


class SyncBilling:
    def handle(self, envelope: Envelope[OrderPlaced]) -> str:
        return bill_now(envelope)


class StaticBilling:
    @staticmethod
    async def handle(envelope: Envelope[OrderPlaced]) -> str:
        return await bill(envelope)


class ClassBilling:
    @classmethod
    def handle(cls, envelope: Envelope[OrderPlaced]) -> str:
        return bill_now(envelope)


async def call(source: HandlerSource, payload: object) -> Any:
    """As a dispatcher would, but for the thread."""
    handler = Handler(source)
    await handler.start()
    assert handler.call is not None
    output = handler.call(handler.checked(Envelope(payload)))
    return await output if inspect.isawaitable(output) else output


@pytest.mark.parametrize(
    ("source", "notes"),
    [
        (bill, IN_LOOP),
        (bill_now, IN_THREAD),
        (partial(bill_by, "EUR"), IN_LOOP),
        (Caller(), IN_LOOP),
        (SyncBilling().handle, IN_THREAD),
        (Billing, IN_LOOP),
        (SyncBilling, IN_THREAD),
        (StaticBilling, IN_LOOP),
        (ClassBilling, IN_THREAD),
        (Billing(), IN_LOOP),
        (SyncBilling(), IN_THREAD),
        (StaticBilling(), IN_LOOP),
    ],
    ids=lambda value: getattr(value, "__qualname__", type(value).__name__),
)
def test_it_stays_of_its_kind_and_checks_its_payloads(source: Any, notes: list[str]) -> None:
    diary = Diary()

    faulty = wrapped(source, diary)

    assert inspect.isclass(faulty) == inspect.isclass(source)
    assert hasattr(faulty, "handle") == hasattr(source, "handle")
    assert Handler(faulty).is_async == Handler(source).is_async
    assert Handler(faulty).payload_type is OrderPlaced
    assert asyncio.run(call(faulty, {"order_id": "7"})) == "7.events"
    assert diary.notes == notes
    with pytest.raises(PayloadMisfit):
        asyncio.run(call(faulty, {"order_id": "seven"}))


def test_wrapping_twice_does_both() -> None:
    inner, outer = Diary(), Diary()

    output = asyncio.run(call(wrapped(wrapped(bill, inner), outer), {"order_id": 7}))

    assert output == "7.events"
    assert inner.notes == outer.notes == IN_LOOP


def test_a_handler_that_takes_anything_still_does() -> None:
    recorder = RecordingHandler()

    asyncio.run(call(wrapped(recorder, Diary()), {"order_id": "seven"}))

    assert recorder.payloads == [{"order_id": "seven"}]


def test_a_function_that_returns_a_coroutine_is_finished_only_when_that_is() -> None:
    diary = Diary()

    async def later(envelope: Envelope[Any]) -> str:
        diary.notes.append("run")
        return "next.events"

    output = asyncio.run(call(wrapped(lambda envelope: later(envelope), diary), 1))

    assert output == "next.events"
    assert diary.notes == ["before", "sleep 3 in thread", "run", "after"]


def test_a_handler_that_fails_has_no_after() -> None:
    diary = Diary()

    async def fail(envelope: Envelope[Any]) -> None:
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        asyncio.run(call(wrapped(fail, diary), 1))

    assert "after" not in diary.notes


@pytest.mark.parametrize("make", [lambda: Billing, Billing], ids=["class", "object"])
def test_start_stop_and_health_work_as_ever(make: Any) -> None:
    handler = Handler(wrapped(make(), Diary()))

    async def live() -> list[object]:
        await handler.start()
        billing: Any = handler._instance
        assert handler.call is not None
        await handler.call(Envelope(OrderPlaced(order_id=7)))  # type: ignore[misc]
        well = await handler.is_healthy()
        billing.steps.append("sick")
        ill = await handler.is_healthy()
        await handler.stop()
        return [well, ill, *billing.steps]

    assert asyncio.run(live()) == [True, False, "start", "handle", "sick", "stop"]


def test_names_are_kept() -> None:
    function: Any = wrapped(bill, Diary())
    subclass: Any = wrapped(Billing, Diary())

    assert (function.__name__, function.__qualname__) == ("bill", "bill")
    assert (subclass.__name__, subclass.__doc__) == ("Billing", "Bills.")
    assert issubclass(subclass, Billing)


def test_what_is_no_handler_is_refused() -> None:
    with pytest.raises(InvalidParameter):
        wrapped("billing", Diary())  # type: ignore[arg-type]
