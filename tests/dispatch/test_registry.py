from enum import Enum
from typing import Any

import pytest

from raydispatch.dispatch.registry import DispatcherRegistry, make_spec
from raydispatch.errors import DuplicateRegistration, InvalidParameter, InvalidState
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute


class NodeKind(Enum):
    EFFECT = "effect"


class OrderDispatcher:
    dispatcher_id = "orders"
    category = MessageCategory.EVENT
    message_types: set[str] | None = {"OrderPlaced"}  # noqa: RUF012
    node_kind: object = NodeKind.EFFECT

    async def handle(self, envelope: Envelope[Any]) -> None: ...


async def handle(envelope: Envelope[Any]) -> None: ...


def make_route() -> DispatchRoute:
    return DispatchRoute(
        route_id="orders", topic_pattern="a.events", message_category=MessageCategory.EVENT, dispatcher_id="orders"
    )


def test_a_protocol_dispatcher_says_itself_what_it_takes() -> None:
    registry = DispatcherRegistry()

    registry.register_dispatcher(OrderDispatcher(), time_limit_seconds=5.0)

    (spec,) = registry.dispatchers()
    assert (spec.dispatcher_id, spec.category) == ("orders", MessageCategory.EVENT)
    assert spec.message_types == frozenset(("OrderPlaced",))
    assert (spec.node_kind, spec.time_limit_seconds) == ("effect", 5.0)


@pytest.mark.parametrize("thing", [handle, OrderDispatcher, object(), None])
def test_what_is_no_protocol_dispatcher_is_refused(thing: Any) -> None:
    with pytest.raises(InvalidParameter, match="no protocol dispatcher"):
        DispatcherRegistry().register_dispatcher(thing)


def test_an_id_is_taken_once() -> None:
    registry = DispatcherRegistry()
    registry.register_dispatcher(OrderDispatcher())
    registry.add_route(make_route())

    with pytest.raises(DuplicateRegistration, match="dispatcher 'orders'"):
        registry.register_dispatcher(OrderDispatcher())
    with pytest.raises(DuplicateRegistration, match="route 'orders'"):
        registry.add_route(make_route())


def test_a_frozen_registry_takes_no_more() -> None:
    registry = DispatcherRegistry()
    registry.freeze()

    with pytest.raises(InvalidState):
        registry.register_dispatcher(OrderDispatcher())
    with pytest.raises(InvalidState):
        registry.add_route(make_route())


@pytest.mark.parametrize("dispatcher_id", ["", "  ", None, 7, "x" * 201])
def test_an_id_that_cannot_be_used_is_refused(dispatcher_id: Any) -> None:
    with pytest.raises(InvalidParameter, match="dispatcher_id"):
        make_spec(dispatcher_id, handle, MessageCategory.EVENT)


@pytest.mark.parametrize("types", ["OrderPlaced", [""], [7]])
def test_message_types_are_a_set_of_names(types: Any) -> None:
    with pytest.raises(InvalidParameter, match="message_types"):
        make_spec("orders", handle, MessageCategory.EVENT, types)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_limit_is_above_zero(seconds: float) -> None:
    with pytest.raises(InvalidParameter, match="time_limit_seconds"):
        make_spec("orders", handle, MessageCategory.EVENT, time_limit_seconds=seconds)


def test_a_category_is_one_of_three() -> None:
    wrong: Any = "rumour"

    with pytest.raises(InvalidParameter, match="event, command, intent"):
        make_spec("orders", handle, wrong)
