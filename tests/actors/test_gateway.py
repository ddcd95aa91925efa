import asyncio
from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectStoreFullError, RaySystemError
from tests.actors.fakes import SETTINGS, FakeHandle, messages_of, orders, run, turns, until

from raydispatch.actors import gateway
from raydispatch.actors import gateway as module
from raydispatch.actors.gateway import Gateway
from raydispatch.actors.wire import Delivery, Parcel, Selection
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.errors import ErrorCode, SystemUnavailable

Look = dict[str, Any] | Exception


class FakeRouter:
    """Hands everything to a dispatcher that is always well."""

    def __init__(self) -> None:
        self.version = "v1"
        self.error: Exception | None = None

    async def route(self, parcel: Parcel) -> Delivery:
        if self.error is not None:
            raise self.error
        return Delivery(self.version, [Selection((("a", "to-a"),))] * len(parcel.keys), [[1.0] for _ in parcel.rows])


class Office:
    """A gateway and two routers. Each look finds what is given for it, and in the end the second router or both."""

    def __init__(self, *looks: Look, both: bool = False, seconds: float = 5, on_version: Any = None) -> None:
        self.one, self.two = FakeHandle(FakeRouter), FakeHandle(FakeRouter)
        self.looks: list[Look] = [*looks, {"one": self.one, "two": self.two} if both else {"two": self.two}]
        self.looked = 0
        self.gateway = Gateway(SETTINGS.model_copy(update={"call_seconds": seconds}), self._find, on_version)

    async def send(self) -> DispatchResult:
        (result,) = await self.gateway.send_batch(messages_of(orders(1)))
        return result

    async def _find(self) -> Sequence[tuple[str, Any]]:
        self.looked += 1
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        return list(found.items())


def refusing(error: Exception) -> Any:
    """The handle of a router whose calls fail where they are made."""

    def remote(parcel: Parcel) -> None:
        raise error

    return SimpleNamespace(route=SimpleNamespace(remote=remote))


def test_when_a_router_dies_another_one_gets_the_same_messages_marked_as_sent_again() -> None:
    async def story() -> None:
        office = Office(both=True)
        office.one.hold("route")
        office.two.hold("route")
        messages = messages_of(orders(1, 2))
        sending = asyncio.ensure_future(office.gateway.send_batch(messages))
        await until(lambda: office.one.calls or office.two.calls)
        dead, other = (office.one, office.two) if office.one.calls else (office.two, office.one)

        dead.crash(for_good=True)
        other.release("route")
        results = await sending

        assert [result.status for result in results] == [DispatchStatus.SUCCESS] * 2
        first, again = dead.calls[0].arguments[0], other.calls[0].arguments[0]
        assert (first.resent, first.ids) == (False, None)
        assert (again.resent, again.ids) == (True, [message.envelope.message_id.int for message in messages])
        assert (again.blobs, again.seconds < first.seconds) == (first.blobs, True)

    run(story())


@pytest.mark.parametrize(
    "first_look",
    [
        pytest.param({}, id="no routers yet"),
        pytest.param(ActorDiedError(), id="the controller is away"),
        pytest.param({"one": refusing(ObjectStoreFullError())}, id="the store is full"),
        pytest.param({"one": refusing(RaySystemError("no raylet"))}, id="the node is in trouble"),
    ],
)
def test_trouble_that_passes_is_waited_out(first_look: Look) -> None:
    async def story() -> None:
        office = Office(first_look)

        result = await office.send()

        assert (result.status, office.looked) == (DispatchStatus.SUCCESS, 2)

    run(story())


def test_a_message_for_which_no_router_appears_in_time_ends_as_a_timeout() -> None:
    async def story() -> None:
        office = Office(seconds=0.02)
        office.looks = [{}]

        result = await office.send()

        assert (result.status, result.error_code) == (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT)
        assert result.error_message == "no outcome within 0.02 s"

    run(story())


def test_a_router_that_does_not_answer_ends_as_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(gateway, "GRACE_SECONDS", 0.02)
        office = Office(seconds=0.02)
        await office.gateway.refresh()
        office.two.hold("route")

        result = await office.send()

        assert (result.status, result.error_code) == (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT)

    run(story())


def test_when_the_system_is_gone_its_messages_are_rejected_at_once() -> None:
    async def story() -> None:
        office = Office(SystemUnavailable("There is no system 'shop'."))

        result = await office.send()

        assert (result.status, result.error_code) == (DispatchStatus.REJECTED, ErrorCode.SHUT_DOWN)
        assert (result.error_message, office.looked) == ("There is no system 'shop'.", 1)

    run(story())


def test_an_error_inside_of_the_router_is_a_result_and_is_not_tried_again() -> None:
    async def story() -> None:
        office = Office()
        office.two.instance.error = KeyError("bug")

        result = await office.send()

        assert (result.status, result.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.REPLICA_LOST)
        assert office.two.count("route") == 1

    run(story())


def test_a_router_that_stays_dead_is_not_asked_without_pause() -> None:
    async def story() -> None:
        office = Office(seconds=4 * module.RETRY_SECONDS)
        office.two.crash(for_good=True)

        result = await office.send()

        assert result.status is DispatchStatus.TIMEOUT
        assert office.two.count("route") < 10

    run(story())


def test_a_router_that_came_back_is_used_again_though_another_one_is_well() -> None:
    async def story() -> None:
        office = Office(both=True)
        office.one.crash_at("route")
        deadline = monotonic() + 1

        while office.one.count("route") < 2 and monotonic() < deadline:
            await office.send()

        assert office.one.count("route") >= 2

    run(story())


def test_a_router_that_is_no_longer_listed_gets_nothing_more() -> None:
    async def story() -> None:
        office = Office()
        office.looks.insert(0, {"one": office.one, "two": office.two})
        await office.gateway.refresh()

        await office.gateway.refresh()
        for _ in range(10):
            await office.send()

        assert (office.one.count("route"), office.two.count("route")) == (0, 10)

    run(story())


def test_every_version_of_the_table_is_told_once() -> None:
    async def story() -> None:
        told: list[str] = []

        async def tell(version: str) -> None:
            told.append(version)

        office = Office(on_version=tell)
        for version in ("v1", "v1", "v2", "v2"):
            office.two.instance.version = version
            await office.send()

        assert told == ["v1", "v2"]

    run(story())


def test_drained_waits_for_what_was_sent_one_by_one() -> None:
    async def story() -> None:
        office = Office()
        office.two.hold("route")
        sent = office.gateway.send(messages_of(orders(1))[0])
        drained = asyncio.ensure_future(office.gateway.drained())
        await turns()
        was_done = drained.done()

        office.two.release("route")
        await drained

        assert (was_done, sent.done()) == (False, True)

    run(story())


def test_a_gateway_serves_one_event_loop_after_another() -> None:
    office = Office()

    async def story() -> DispatchResult:
        return await office.gateway.send(messages_of(orders(1))[0])

    assert [run(story()).status, run(story()).status] == [DispatchStatus.SUCCESS] * 2
