"""Explain: who gets a message, who does not, and why."""

from typing import Any

import pytest

from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.explain import Explanation, explain
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable

EVENT, COMMAND = MessageCategory.EVENT, MessageCategory.COMMAND


def route(route_id: str, pattern: str, dispatcher_id: str = "d", **more: Any) -> DispatchRoute:
    return DispatchRoute(
        **{
            "route_id": route_id,
            "topic_pattern": pattern,
            "message_category": EVENT,
            "dispatcher_id": dispatcher_id,
            **more,
        }
    )


def table_of(*routes: DispatchRoute, **types: set[str]) -> RouteTable:
    dispatchers = {
        one.dispatcher_id: DispatcherTypes(
            one.message_category, frozenset(types[one.dispatcher_id]) if one.dispatcher_id in types else None
        )
        for one in routes
    }
    return RouteTable(routes, dispatchers)


def reasons(explanation: Explanation) -> dict[str, str]:
    return {verdict.route.route_id: verdict.reason for verdict in explanation.passed_over}


def test_who_is_selected_stands_in_order_with_the_reason() -> None:
    table = table_of(
        route("regex", "regex:dev.*", "c"), route("exact", "dev.a.events", "a"), route("glob", "**", "b", priority=7)
    )

    explanation = explain(table, "dev.a.events", "A")

    assert [(verdict.route.route_id, verdict.reason) for verdict in explanation.selected] == [
        ("glob", "first in order: priority 7, pattern"),
        ("exact", "number 2 in order: priority 0, exact topic"),
        ("regex", "number 3 in order: priority 0, regular expression"),
    ]
    assert (explanation.topic, explanation.message_type) == ("dev.a.events", "A")
    assert (explanation.category, explanation.fault) == (EVENT, None)
    assert (explanation.passed_over, explanation.similar) == ((), ())
    assert explanation.table_version == table.version


def test_a_route_whose_pattern_fits_is_passed_over_for_a_reason() -> None:
    table = table_of(
        route("chosen", "dev.a.events", "d"),
        route("again", "dev.*.events", "d"),
        route("disabled", "**", "d", enabled=False),
        route("typed", "**", "d", message_type="B"),
        route("choosy", "**", "picky"),
        route("closed", "**", "closed"),
        route("category", "**", "commander", message_category=COMMAND),
        route("elsewhere", "prod.**", "d"),
        picky={"X", "B"},
        closed=set(),
    )

    explanation = explain(table, "dev.a.events", "A")

    assert [verdict.route.route_id for verdict in explanation.selected] == ["chosen"]
    assert reasons(explanation) == {
        "again": "its dispatcher runs already, by 'chosen'",
        "disabled": "the route is disabled",
        "typed": "it is for the type B",
        "choosy": "its dispatcher takes B, X only",
        "closed": "its dispatcher takes no type at all only",
        "category": "it is for the category command",
    }


def test_a_command_names_the_one_who_came_first() -> None:
    table = table_of(
        route("wide", "**", "x", message_category=COMMAND), route("exact", "a.commands", "y", message_category=COMMAND)
    )

    explanation = explain(table, "a.commands")

    assert [verdict.route.route_id for verdict in explanation.selected] == ["exact"]
    assert reasons(explanation) == {"wide": "a command has one dispatcher, and 'exact' comes first"}


def test_where_nothing_fits_the_most_similar_patterns_are_named() -> None:
    table = table_of(
        route("near", "dev.order.events.v1"), route("nearer", "dev.orders.event.*"), route("far", "zzzzzzz.q")
    )

    explanation = explain(table, "dev.orders.events.v1")

    assert explanation.selected == ()
    assert explanation.passed_over == ()
    assert {one.route_id for one in explanation.similar} == {"near", "nearer"}


def test_at_most_three_similar_patterns_are_named() -> None:
    table = table_of(*(route(f"r{i}", f"dev.order.events.v{i}") for i in range(9)))

    assert len(explain(table, "dev.order.events.x").similar) == 3


@pytest.mark.parametrize(
    ("topic", "fault"),
    [("dev..events", "has an empty segment"), ("dev.a", "No segment of the topic"), ("x" * 501, "501 characters")],
)
def test_the_fault_of_a_topic_is_told(topic: str, fault: str) -> None:
    explanation = explain(table_of(route("prod", "prod.events")), topic)

    assert explanation.fault is not None
    assert fault in explanation.fault
    assert explanation.category is None
    assert explanation.selected == ()


def test_a_topic_without_a_category_passes_over_what_fits() -> None:
    explanation = explain(table_of(route("all", "**")), "dev.a")

    assert reasons(explanation) == {"all": "it is for the category event"}
