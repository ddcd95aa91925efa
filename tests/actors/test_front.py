import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.actors.fakes import EVENT, SETTINGS, TOPIC, FakeHandle, Log, Switchboard, orders, run

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors.front import FrontEngine
from raydispatch.actors.gateway import Gateway
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import ErrorCode, InvalidParameter, SystemUnavailable
from raydispatch.settings import EngineSettings

COMMAND = MessageCategory.COMMAND
ORDER = "dev.order.commands.v1"

BROKEN: list[tuple[str, Envelope[Any], ErrorCode]] = [
    ("dev.order.v1", Envelope(1), ErrorCode.INVALID_TOPIC),
    (TOPIC, Envelope(b"x" * 51), ErrorCode.PAYLOAD_TOO_LARGE),
    (TOPIC, Envelope(threading.Lock()), ErrorCode.PAYLOAD_INVALID),
]
WRONG: list[tuple[Any, Any]] = [(None, Envelope(1)), ("  ", Envelope(1)), (7, Envelope(1)), (TOPIC, {"order": 1})]


class Shop:
    """A front, and behind it a router with the dispatchers `events` and `orders`."""

    def __init__(self) -> None:
        engine = DispatchEngine()
        engine.dispatcher("events", topics=TOPIC, category=EVENT)(print)
        engine.dispatcher("orders", topics=ORDER, category=COMMAND)(print)
        self.board = Switchboard(engine.freeze())
        self.is_gone = False
        self.looked = 0
        gateway = Gateway(SETTINGS, self._find_routers)
        settings = EngineSettings(max_payload_bytes=50)
        self.front = FrontEngine("shop", self.board.table, gateway, settings=settings)

    async def _find_routers(self) -> Sequence[tuple[str, Any]]:
        self.looked += 1
        if self.is_gone:
            raise SystemUnavailable("gone")
        await self.board.follow()
        return [("router", FakeHandle(lambda: self.board.router))]

    @property
    def sent(self) -> list[list[Any]]:
        """What has reached the dispatchers of the system, call by call."""
        return self.board.parts("events") + self.board.parts("orders")


# Messages


def test_a_message_goes_to_the_system_and_comes_back_as_a_result() -> None:
    async def story() -> None:
        shop = Shop()

        result = await shop.front.dispatch(TOPIC, Envelope(1))

        assert (result.status, result.dispatcher_id, shop.sent) == (DispatchStatus.SUCCESS, "events", [[1]])

    run(story())


@pytest.mark.parametrize(("topic", "envelope", "code"), BROKEN)
def test_a_message_that_cannot_be_sent_is_a_result(topic: str, envelope: Envelope[Any], code: ErrorCode) -> None:
    async def story() -> None:
        shop = Shop()

        results = [await shop.front.dispatch(topic, envelope), await shop.front.begin(topic, envelope)]

        assert [(one.status, one.error_code) for one in results] == [(DispatchStatus.INVALID_MESSAGE, code)] * 2
        assert (shop.sent, shop.front.get_structured_metrics().total_dispatches) == ([], 2)

    run(story())


def test_broken_messages_cost_the_rest_of_a_batch_nothing() -> None:
    async def story() -> None:
        shop = Shop()
        broken = [(topic, envelope) for topic, envelope, _ in BROKEN]

        results = await shop.front.send_many([broken[0], *orders(1), broken[1], broken[2], *orders(2)])

        codes = [code for _, _, code in BROKEN]
        assert [result.error_code for result in results] == [codes[0], None, codes[1], codes[2], None]
        assert shop.sent == [[1, 2]]

    run(story())


def test_a_batch_of_nothing_but_broken_messages_needs_no_system() -> None:
    async def story() -> None:
        shop = Shop()

        results = await shop.front.send_many([(topic, envelope) for topic, envelope, _ in BROKEN])

        assert [result.error_code for result in results] == [code for _, _, code in BROKEN]
        assert shop.looked == 0

    run(story())


@pytest.mark.parametrize(("topic", "envelope"), WRONG)
def test_wrong_types_are_mistakes_of_the_program(topic: Any, envelope: Any) -> None:
    async def story() -> None:
        shop = Shop()

        for verb in (shop.front.dispatch, shop.front.begin):
            with pytest.raises(InvalidParameter):
                await verb(topic, envelope)

    run(story())


@pytest.mark.parametrize(("topic", "envelope"), WRONG)
def test_wrong_types_in_a_batch_are_mistakes_of_the_program(topic: Any, envelope: Any) -> None:
    async def story() -> None:
        with pytest.raises(InvalidParameter):
            await Shop().front.send_many([(topic, envelope)])

    run(story())


# Sessions


async def in_session(shop: Shop, topic: str, envelope: Envelope[Any]) -> tuple[Any, Log]:
    """The result of a message, and what the session's own dispatcher saw."""
    log = Log()
    async with shop.front.session("job") as session:
        session.dispatcher("own", topics="dev.**", category=MessageCategory.from_topic(topic) or EVENT)(log.handle)
        result = await session.dispatch(topic, envelope)
    return result, log


def test_a_command_of_a_session_goes_to_the_session_alone() -> None:
    async def story() -> None:
        shop = Shop()

        result, log = await in_session(shop, ORDER, Envelope(1))

        assert (result.dispatcher_id, log.payloads, shop.sent) == ("own", [1], [])

    run(story())


def test_an_event_of_a_session_goes_to_the_session_first_and_to_the_system_as_well() -> None:
    async def story() -> None:
        shop = Shop()

        result, log = await in_session(shop, TOPIC, Envelope(1))

        assert [outcome.dispatcher_id for outcome in result.outcomes] == ["own", "events"]
        assert (result.status, result.dispatcher_id) == (DispatchStatus.SUCCESS, "own")
        assert (log.payloads, shop.sent) == ([1], [[1]])

    run(story())


def test_an_event_that_only_the_session_takes_does_not_leave_the_process() -> None:
    async def story() -> None:
        shop = Shop()

        result, _ = await in_session(shop, "dev.invoice.events.v1", Envelope(1))

        assert (result.status, result.dispatcher_id, shop.looked) == (DispatchStatus.SUCCESS, "own", 0)

    run(story())


def test_an_event_that_the_system_never_got_is_no_success() -> None:
    async def story() -> None:
        shop = Shop()
        shop.is_gone = True

        result, _ = await in_session(shop, TOPIC, Envelope(1))

        assert (result.status, result.error_code) == (DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN)

    run(story())


def test_messages_of_a_session_find_its_dispatchers_in_a_batch_too() -> None:
    async def story() -> None:
        shop, log = Shop(), Log()
        async with shop.front.session("job") as session:
            session.dispatcher("own", topics="dev.**", category=COMMAND)(log.handle)

            await shop.front.send_many([(ORDER, Envelope(1).in_session("job")), (ORDER, Envelope(2))])

        assert (log.payloads, shop.sent) == ([1], [[2]])

    run(story())


def test_a_message_outside_of_the_session_does_not_find_its_dispatchers() -> None:
    async def story() -> None:
        shop, log = Shop(), Log()
        async with shop.front.session("job") as session:
            session.dispatcher("own", topics="dev.**", category=COMMAND)(log.handle)

            await shop.front.dispatch(ORDER, Envelope(1))

        assert (log.payloads, shop.sent) == ([], [[1]])

    run(story())
