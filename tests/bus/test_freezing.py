import logging
from typing import Any

import pytest

from raydispatch.bus.freezing import checked_table
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.errors import ErrorCode, InvalidTable
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND


async def quiet(envelope: Envelope[Any]) -> None: ...


def route(route_id: str, dispatcher_id: str, pattern: str, category: MessageCategory = EVENT) -> DispatchRoute:
    return DispatchRoute(
        route_id=route_id, topic_pattern=pattern, message_category=category, dispatcher_id=dispatcher_id
    )


def spec(dispatcher_id: str, category: MessageCategory = EVENT, types: frozenset[str] | None = None) -> DispatcherSpec:
    return DispatcherSpec(dispatcher_id, quiet, category, types)


def freeze(routes: list[DispatchRoute], specs: list[DispatcherSpec], strict: bool = False) -> RouteTable:
    return checked_table(routes, specs, cache_entries=10, strict=strict, log=logging.getLogger("raydispatch"))


OVERLAPPING = [route("one", "a", "dev.*.commands", COMMAND), route("two", "b", "*.order.commands", COMMAND)]
COMMANDERS = [spec("a", COMMAND), spec("b", COMMAND)]


def test_a_table_selects_what_was_registered() -> None:
    table = freeze([route("r", "a", "dev.**.events")], [spec("a", types=frozenset({"OrderPlaced"}))])

    assert [found.route_id for found in table.select("dev.order.events", EVENT, "OrderPlaced")] == ["r"]
    assert not table.select("dev.order.events", EVENT, "OrderLost")


def test_nothing_registered_is_an_empty_table() -> None:
    assert not freeze([], []).select("dev.order.events", EVENT, "OrderPlaced")


def test_all_faults_are_named_at_once_the_missing_first() -> None:
    with pytest.raises(InvalidTable) as caught:
        freeze(
            [route("z", "a", "x.events"), route("y", "b", "x.events"), route("x", "c", "x.events")],
            [spec("a", COMMAND)],
        )

    assert caught.value.error_code is ErrorCode.ITEM_NOT_REGISTERED
    assert caught.value.faults == (
        "route 'x' leads to the dispatcher 'c', which is not registered",
        "route 'y' leads to the dispatcher 'b', which is not registered",
        "route 'z' is for events, its dispatcher 'a' for commands",
    )


def test_faults_of_category_alone_have_their_own_code() -> None:
    with pytest.raises(InvalidTable) as caught:
        freeze([route("z", "a", "x.events")], [spec("a", COMMAND)])

    assert caught.value.error_code is ErrorCode.INVALID_PARAMETER


def test_commands_for_two_are_warned_of_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    freeze(OVERLAPPING, COMMANDERS)
    with pytest.raises(InvalidTable) as caught:
        freeze(OVERLAPPING, COMMANDERS, strict=True)

    assert caplog.messages == ["command routes overlap"]
    assert caught.value.faults == (caplog.records[0].__dict__["overlap"],)


def test_routes_of_one_dispatcher_and_those_of_events_may_overlap(caplog: pytest.LogCaptureFixture) -> None:
    freeze(
        [route("one", "a", "dev.*.commands", COMMAND), route("two", "a", "dev.**", COMMAND)], COMMANDERS, strict=True
    )
    freeze([route("one", "a", "dev.*.events"), route("two", "b", "dev.**")], [spec("a"), spec("b")], strict=True)

    assert caplog.messages == []
