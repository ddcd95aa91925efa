import asyncio
import contextvars
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from raydispatch.dispatch.handler import Handler, PayloadMisfit, payload_type_of, run_in_thread
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope


class Order(BaseModel):
    number: int
    name: str = "?"


class Plain:
    pass


async def takes_order(envelope: Envelope[Order]) -> None: ...


async def takes_order_as_text(envelope: "Envelope[Order]") -> None: ...


async def takes_anything(envelope: Envelope[object]) -> None: ...


async def takes_text(envelope: Envelope[str]) -> None: ...


async def takes_plain(envelope: Envelope[Plain]) -> None: ...


class OrderHandler:
    def handle(self, envelope: Envelope[Order]) -> None: ...


class CallableOrder:
    async def __call__(self, envelope: Envelope[Order]) -> None: ...


class Hooked:
    made: list["Hooked"]

    def __init__(self) -> None:
        self.events: list[str] = []
        type(self).made.append(self)

    def handle(self, envelope: Envelope[Any]) -> None: ...


@pytest.mark.parametrize("payload", [{"number": 7}, '{"number": 7}', b'{"number": 7}', bytearray(b'{"number": 7}')])
def test_a_payload_becomes_what_the_annotation_asks_for(payload: object) -> None:
    envelope = Envelope(payload, message_type="OrderPlaced")

    checked = Handler(takes_order).checked(envelope)

    assert checked.payload == Order(number=7)
    assert (checked.message_type, checked.message_id) == ("OrderPlaced", envelope.message_id)


@pytest.mark.parametrize(
    "source",
    [takes_order, takes_order_as_text, OrderHandler, OrderHandler(), CallableOrder(), partial(takes_order)],
    ids=repr,
)
def test_the_annotation_is_found_however_the_handler_is_written(source: Any) -> None:
    assert Handler(source).payload_type is Order


def test_a_payload_of_the_right_class_is_passed_as_it_is() -> None:
    envelope = Envelope(Order(number=7))

    assert Handler(takes_order).checked(envelope) is envelope


@pytest.mark.parametrize("payload", [{"number": "x"}, "no json", b"\xff", None, {}, Plain()])
def test_a_payload_that_does_not_fit_is_refused(payload: object) -> None:
    with pytest.raises(PayloadMisfit):
        Handler(takes_order).checked(Envelope(payload))


def test_envelopes_of_objects_are_not_validated() -> None:
    envelope = Envelope(b"\xff")

    assert Handler(takes_anything).checked(envelope) is envelope
    assert payload_type_of(takes_anything) is None


def test_text_is_text_and_not_read_as_json() -> None:
    assert Handler(takes_text).checked(Envelope('{"number": 7}')).payload == '{"number": 7}'


def test_a_class_unknown_to_pydantic_is_asked_for_by_instance() -> None:
    plain = Plain()

    assert Handler(takes_plain).checked(Envelope(plain)).payload is plain
    with pytest.raises(PayloadMisfit):
        Handler(takes_plain).checked(Envelope({}))


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    async def handle(envelope: "Envelope[Nowhere]") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidParameter, match=r"Envelope\[Nowhere\].*handle"):
        Handler(handle)


@pytest.mark.parametrize("source", [7, "text", None, Plain, lambda: None])
def test_what_cannot_handle_a_message_is_refused(source: Any) -> None:
    with pytest.raises(InvalidParameter):
        Handler(source)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_class_is_built_and_started_once_under_concurrency_and_stopped(is_async: bool) -> None:
    class Sync(Hooked):
        made: list[Hooked] = []  # noqa: RUF012

        def start(self) -> None:
            self.events.append("start")

        def stop(self) -> None:
            self.events.append("stop")

    class Async(Hooked):
        made: list[Hooked] = []  # noqa: RUF012

        async def start(self) -> None:
            await asyncio.sleep(0)
            self.events.append("start")

        async def stop(self) -> None:
            self.events.append("stop")

    chosen = Async if is_async else Sync
    handler = Handler(chosen)

    async def live() -> None:
        await asyncio.gather(*(handler.start() for _ in range(20)))
        await handler.stop()
        await handler.stop()

    asyncio.run(live())

    assert [made.events for made in chosen.made] == [["start", "stop"]]
    assert handler.call is None


def test_after_a_stop_it_can_be_started_anew() -> None:
    class Counted(Hooked):
        made: list[Hooked] = []  # noqa: RUF012

    handler = Handler(Counted)

    async def live() -> None:
        await handler.start()
        await handler.stop()
        await handler.start()

    asyncio.run(live())

    assert len(Counted.made) == 2
    assert handler.call is not None


def test_a_failing_start_is_told_to_all_who_wait_and_tried_again() -> None:
    class Failing(Hooked):
        made: list[Hooked] = []  # noqa: RUF012

        async def start(self) -> None:
            await asyncio.sleep(0)
            if len(self.made) == 1:
                raise ConnectionError("down")

    handler = Handler(Failing)

    async def live() -> list[BaseException | None]:
        ended = await asyncio.gather(*(handler.start() for _ in range(3)), return_exceptions=True)
        await handler.start()
        return ended

    assert [type(ended) for ended in asyncio.run(live())] == [ConnectionError] * 3
    assert len(Failing.made) == 2


class Gated(Hooked):
    gate: asyncio.Event

    async def start(self) -> None:
        await self.gate.wait()


@pytest.mark.parametrize("cancelled", [0, 1], ids=["the starter", "a waiter"])
def test_one_who_gives_up_starting_does_not_end_it_for_the_others(cancelled: int) -> None:
    class Mine(Gated):
        made: list[Hooked] = []  # noqa: RUF012

    handler = Handler(Mine())

    async def live() -> list[BaseException | None]:
        Mine.gate = asyncio.Event()
        tasks = [asyncio.create_task(handler.start()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[cancelled].cancel()
        await asyncio.wait([tasks[cancelled]])
        Mine.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = [type(end) for end in asyncio.run(live())]

    assert ended.pop(cancelled) is asyncio.CancelledError
    assert ended == [type(None)] * 2
    assert handler.call is not None


def test_a_thread_sees_the_context_of_its_task() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def run() -> object:
        variable.set("seen")
        return await run_in_thread(variable.get)

    assert asyncio.run(run()) == "seen"


def test_a_model_of_another_class_is_taken_by_its_fields() -> None:
    class Wanted(BaseModel):
        number: int

    class Given(BaseModel):
        number: int

    class Unlike(BaseModel):
        name: str

    async def handle(envelope: Envelope[Wanted]) -> None: ...

    handler = Handler(handle)

    assert handler.checked(Envelope(Given(number=7))).payload == Wanted(number=7)
    with pytest.raises(PayloadMisfit):
        handler.checked(Envelope(Unlike(name="x")))
