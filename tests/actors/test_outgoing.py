import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
import ray
from tests.actors.fakes import SETTINGS, TOPIC, FakeHandle, FakeReplica, Switchboard, run, table_of, turns, until

from raydispatch import Envelope
from raydispatch.actors.names import NAMESPACE, controller_name
from raydispatch.actors.outgoing import Outgoing, find_routers
from raydispatch.actors.wire import Item
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.errors import SystemUnavailable
from raydispatch.messages.envelope import REPLY_TO_HEADER
from raydispatch.settings import EngineSettings


class Desk:
    """The controller of the system `shop`, as far as outputs need it."""

    def __init__(self, router: FakeHandle) -> None:
        self.letters: list[tuple[str, UUID, Reply]] = []
        self._router = router

    async def routers(self) -> list[tuple[str, Any]]:
        return [("router", self._router)]

    async def deliver_reply(self, asker: str, correlation_id: UUID, reply: Reply) -> None:
        self.letters.append((asker, correlation_id, reply))


class Shop:
    """A router and a dispatcher behind an outbox; it replies with ten times the payload, if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replies: bool = False) -> None:
        self.replica = FakeReplica(_reply if replies else None)
        self.board = Switchboard(table_of(("a", "dev.**", 0)), {"a": [self.replica]})
        self.router = FakeHandle(lambda: self.board.router)
        self.desk = Desk(self.router)
        self.controller: FakeHandle | None = FakeHandle(lambda: self.desk)
        monkeypatch.setattr(ray, "get_actor", self._get_actor)

    async def outgoing(self, **settings: int) -> Outgoing:
        await self.board.follow()
        return Outgoing("shop", EngineSettings.model_validate(settings), SETTINGS)

    @property
    def payloads(self) -> list[Any]:
        return [payload for part in self.replica.payloads for payload in part]

    def _get_actor(self, name: str, namespace: str) -> FakeHandle:
        if self.controller is None or (name, namespace) != (controller_name("shop"), NAMESPACE):
            raise ValueError(name)
        return self.controller


def _reply(payload: Any) -> Item:
    return Outcome("a", DispatchStatus.SUCCESS, "a:dev.**", attempts=1, reply=Reply(payload * 10))


def outputs(*payloads: object, asker: str = "") -> list[Envelope[Any]]:
    headers = {REPLY_TO_HEADER: asker} if asker else {}
    return [Envelope(payload, "Order", TOPIC, headers=headers) for payload in payloads]


def errors(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What was logged, with the reason."""
    return [(one.getMessage(), getattr(one, "error", "")) for one in caplog.records if one.levelname == "ERROR"]


# Delivering


def test_what_was_accepted_is_delivered_to_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch)
        outgoing = await shop.outgoing()

        accepted = await outgoing.accept(outputs(1, 2))
        await outgoing.drained()

        assert (accepted, shop.payloads) == (True, [1, 2])
        assert {key for part in shop.replica.parts for key in part.keys} == {(TOPIC, "Order")}

    run(story())


def test_outputs_for_which_there_is_no_room_are_refused_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr("raydispatch.delivery.outbox.RETRY_SECONDS", ())
        shop = Shop(monkeypatch)
        outgoing = await shop.outgoing(outbox_capacity=2)

        verdicts = [await outgoing.accept(outputs(1, 2, 3)), await outgoing.accept(outputs(4, 5))]
        await outgoing.drained()

        assert (verdicts, shop.payloads) == ([False, True], [4, 5])

    run(story())


def test_drained_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch)
        shop.router.hold("route")
        outgoing = await shop.outgoing()
        await outgoing.accept(outputs(1))
        await until(lambda: shop.router.count("route"))

        drained = asyncio.ensure_future(outgoing.drained())
        await turns()
        was_done = drained.done()
        shop.router.release("route")
        await drained

        assert (was_done, shop.payloads) == (False, [1])

    run(story())


def test_an_output_that_cannot_travel_is_logged_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch)
        outgoing = await shop.outgoing()

        await outgoing.accept(outputs(1, threading.Lock(), 2))
        await outgoing.drained()
        gc.collect()  # So that asyncio complains now, if it has to.

        assert shop.payloads == [1, 2]
        ((message, reason),) = errors(caplog)
        assert message == "output not delivered"
        assert "cannot be sent" in reason

    run(story())


def test_an_output_that_reached_no_router_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch)
        outgoing = await shop.outgoing()
        shop.controller = None

        await outgoing.accept(outputs(1))
        await outgoing.drained()

        assert [message for message, _ in errors(caplog)] == ["output not delivered"]

    run(story())


def test_what_is_left_when_the_replica_stops_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch)
        shop.router.hold("route")
        await (await shop.outgoing()).accept(outputs(1))
        await until(lambda: shop.router.count("route"))

    run(story())

    assert errors(caplog) == [("output not delivered", "the replica was stopped")]


# Replies


def test_a_reply_further_down_the_chain_goes_to_the_mailbox_of_the_one_who_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch, replies=True)
        outgoing = await shop.outgoing()
        (question,) = outputs(4, asker="gateway-7")

        await outgoing.accept([question])
        await outgoing.drained()

        assert shop.desk.letters == [("gateway-7", question.correlation_id, Reply(40))]

    run(story())


def test_a_reply_that_nobody_asked_for_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch, replies=True)
        outgoing = await shop.outgoing()

        await outgoing.accept(outputs(4))
        await outgoing.drained()

        assert (shop.payloads, shop.desk.letters) == ([4], [])

    run(story())


def test_a_reply_that_does_not_arrive_is_logged_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        shop = Shop(monkeypatch, replies=True)
        assert shop.controller is not None
        shop.controller.crash_at("deliver_reply")
        outgoing = await shop.outgoing()

        await outgoing.accept(outputs(4, asker="gateway-7"))
        await outgoing.drained()

        assert [message for message, _ in errors(caplog)] == ["reply not delivered"]

    run(story())


# Finding the routers


def test_a_system_without_a_controller_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> Sequence[Any]:
        Shop(monkeypatch).controller = None
        return await find_routers("shop")

    with pytest.raises(SystemUnavailable, match="no system 'shop'"):
        run(story())
