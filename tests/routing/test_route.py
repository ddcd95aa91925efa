"""Routes: checked at birth, frozen, and in one total order."""

from typing import Any

import pytest
from pydantic import ValidationError

from raydispatch.errors import InvalidPattern
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute


def route(route_id: str = "r", pattern: str = "**", **more: Any) -> DispatchRoute:
    return DispatchRoute(
        **{
            "route_id": route_id,
            "topic_pattern": pattern,
            "message_category": MessageCategory.EVENT,
            "dispatcher_id": "d",
            **more,
        }
    )


def test_a_route_has_defaults() -> None:
    made = route()

    assert (made.message_type, made.priority, made.enabled, made.description) == (None, 0, True, None)
    assert (made.correlation_id, made.metadata) == (None, {})


def test_a_route_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        route().priority = 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("route_id", ""),
        ("route_id", "  "),
        ("route_id", "x" * 201),
        ("dispatcher_id", ""),
        ("dispatcher_id", "x" * 201),
        ("message_type", ""),
        ("message_category", "question"),
        ("priority", 1001),
        ("priority", -1001),
        ("colour", "red"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        route(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("priority", 1000), ("priority", -1000), ("route_id", "x" * 200)])
def test_the_limits_themselves_are_allowed(field: str, value: Any) -> None:
    assert getattr(route(**{field: value}), field) == value


def test_a_bad_pattern_is_refused_with_its_caret() -> None:
    with pytest.raises(InvalidPattern, match=r"a\.\.b\n    \^"):
        route(pattern="a..b")


def test_a_route_takes_its_category_type_and_topic_only() -> None:
    made = route(pattern="dev.*", message_type="A")

    assert made.matches("DEV.x", MessageCategory.EVENT, "A")
    assert not made.matches("dev.x", MessageCategory.COMMAND, "A")
    assert not made.matches("dev.x", MessageCategory.EVENT, "a")
    assert not made.matches("dev.x", MessageCategory.EVENT)
    assert not made.matches("prod.x", MessageCategory.EVENT, "A")


def test_a_disabled_route_takes_nothing_though_its_pattern_fits() -> None:
    made = route(enabled=False)

    assert made.matches_topic("a")
    assert not made.matches("a", MessageCategory.EVENT)


def test_routes_stand_in_the_documented_order() -> None:
    expected = [
        route("z-priority", "regex:.*", priority=1),
        route("z-exact", "a.b"),
        route("z-partial", "a.b*"),
        route("z-two-partials", "a.b*.c*"),
        route("z-star-more-literals", "a.b.*"),
        route("z-star", "a.*"),
        route("z-two-stars", "a.b.c.*.*"),
        route("z-rest", "a.b.c.d.**"),
        route("a-two-rests", "**.**"),
        route("b-two-rests", "**.**"),
        route("a-regex", "regex:a"),
        route("a-low", "a.b", priority=-1),
    ]

    shuffled = [*expected[1::2], *expected[::2]]

    assert sorted(shuffled, key=lambda one: one.order) == expected
