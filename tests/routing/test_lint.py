"""Lint: each rule speaks where it should, and is silent elsewhere."""

from typing import Any

import pytest

from raydispatch.messages.topic import MessageCategory
from raydispatch.routing import lint as lint_module
from raydispatch.routing.lint import Finding, LintLevel, LintRule, command_overlaps, lint
from raydispatch.routing.overlap import OverlapSearch
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable

EVENT, COMMAND, INTENT = MessageCategory.EVENT, MessageCategory.COMMAND, MessageCategory.INTENT


def event(route_id: str, pattern: str, dispatcher_id: str = "d", **more: Any) -> DispatchRoute:
    return DispatchRoute(
        **{
            "route_id": route_id,
            "topic_pattern": pattern,
            "message_category": EVENT,
            "dispatcher_id": dispatcher_id,
            **more,
        }
    )


def command(route_id: str, pattern: str, dispatcher_id: str = "d", **more: Any) -> DispatchRoute:
    return event(route_id, pattern, dispatcher_id, message_category=COMMAND, **more)


def table_of(*routes: DispatchRoute, **types: set[str]) -> RouteTable:
    dispatchers = {
        one.dispatcher_id: DispatcherTypes(
            one.message_category, frozenset(types[one.dispatcher_id]) if one.dispatcher_id in types else None
        )
        for one in routes
    }
    return RouteTable(routes, dispatchers)


def rules(*routes: DispatchRoute, **types: set[str]) -> list[tuple[LintRule, str]]:
    return [(finding.rule, finding.subject) for finding in lint(table_of(*routes, **types))]


def test_a_sound_table_has_no_findings() -> None:
    findings = rules(
        event("orders", "*.order.events.**", "billing"),
        event("everything", "**", "audit"),
        event("regex", "regex:dev.*", "billing"),
        command("pay", "*.pay.commands", "payer"),
        command("ship", "*.ship.commands", "shipper"),
    )

    assert findings == []


def test_a_type_that_the_dispatcher_refuses_makes_a_route_unreachable() -> None:
    table = table_of(event("typed", "a.events", message_type="B"), event("fine", "b.events", message_type="A"), d={"A"})

    assert lint(table) == [
        Finding(
            LintLevel.ERROR,
            LintRule.UNREACHABLE,
            "typed",
            "it asks for B, which the dispatcher 'd' does not take",
        )
    ]


@pytest.mark.parametrize("pattern", ["a.b", "a.commands", "events.commands", "a.x*", "events.commands.b", "[!e]vents"])
def test_a_pattern_that_no_topic_of_the_category_fits_is_unreachable(pattern: str) -> None:
    [finding] = lint(table_of(event("r", pattern)))

    assert (finding.level, finding.rule, finding.subject) == (LintLevel.ERROR, LintRule.UNREACHABLE, "r")
    assert finding.message == f"no topic that fits {pattern} is of the category event"


@pytest.mark.parametrize(
    "pattern",
    [
        "a.events",
        "a.EVENT.b",
        "commands.events",
        "a.*",
        "commands.*.x",
        "**",
        "commands.**",
        "a.e*",
        "?vent",
        "regex:a",
    ],
)
def test_a_pattern_that_some_topic_of_the_category_fits_is_reachable(pattern: str) -> None:
    assert rules(event("r", pattern)) == []


def test_a_route_that_an_earlier_one_of_its_dispatcher_covers_is_shadowed() -> None:
    [finding] = lint(table_of(event("narrow", "a.events"), event("wide", "*.events", priority=1)))

    assert (finding.level, finding.rule, finding.subject) == (LintLevel.WARNING, LintRule.SHADOWED, "narrow")
    assert finding.message == "it adds nothing: 'wide' sends all of a.events to the same dispatcher already"


def test_a_command_route_that_an_earlier_one_covers_never_wins() -> None:
    findings = lint(table_of(command("narrow", "a.commands", "x"), command("wide", "*.commands", "y", priority=1)))

    [shadowed] = [finding for finding in findings if finding.rule is LintRule.SHADOWED]
    assert shadowed.subject == "narrow"
    assert shadowed.message == "it never wins: 'wide' (*.commands) comes first and takes all of its commands"


@pytest.mark.parametrize(
    "routes",
    [
        pytest.param([event("a", "a.events", "x"), event("b", "*.events", "y", priority=1)], id="another dispatcher"),
        pytest.param([event("a", "a.events"), event("b", "*.events")], id="the wide one comes later"),
        pytest.param([event("a", "a.events"), event("b", "*.events", priority=1, enabled=False)], id="disabled"),
        pytest.param([event("a", "a.events"), event("b", "*.events", priority=1, message_type="A")], id="typed"),
        pytest.param([event("a", "a.events.*"), event("b", "*.events", priority=1)], id="not covered"),
        pytest.param([event("a", "a.*"), command("b", "**", priority=1)], id="another category"),
        pytest.param([event("a", "a.events"), event("b", "regex:.*", priority=1)], id="regular expression"),
    ],
)
def test_a_route_that_still_plays_a_part_is_not_shadowed(routes: list[DispatchRoute]) -> None:
    assert rules(*routes) == []


def test_command_routes_of_two_dispatchers_that_can_meet_overlap() -> None:
    [finding] = lint(table_of(command("one", "a.*.commands", "x"), command("two", "*.b.commands", "y")))

    assert (finding.level, finding.rule, finding.subject) == (LintLevel.WARNING, LintRule.OVERLAPPING, "two")
    assert finding.message == ("commands on a.*.commands and *.b.commands can meet: 'one' (x) wins over 'two' (y)")


@pytest.mark.parametrize(
    "routes",
    [
        pytest.param([command("a", "a.*.commands", "x"), command("b", "*.b.commands", "x")], id="one dispatcher"),
        pytest.param([command("a", "a.commands", "x"), command("b", "b.commands", "y")], id="no topic in common"),
        pytest.param([event("a", "a.*.events", "x"), event("b", "*.b.events", "y")], id="events"),
        pytest.param(
            [
                command("a", "a.*.commands", "x", message_type="A"),
                command("b", "*.b.commands", "y", message_type="B"),
            ],
            id="no type in common",
        ),
    ],
)
def test_routes_that_cannot_compete_do_not_overlap(routes: list[DispatchRoute]) -> None:
    assert rules(*routes) == []


def test_a_disabled_command_route_does_not_overlap() -> None:
    found = rules(command("a", "a.*.commands", "x"), command("b", "*.b.commands", "y", enabled=False))

    assert found == [(LintRule.NO_ROUTE, "y")]


def test_the_list_of_overlaps_is_bounded() -> None:
    table = table_of(*(command(f"r{i}", "**", f"d{i}") for i in range(30)))

    few, _ = command_overlaps(table, most=5)
    findings = [finding for finding in lint(table) if finding.rule is LintRule.OVERLAPPING]

    assert len(few) == 5
    assert len(findings) == lint_module.MOST_OVERLAPS


def test_too_much_to_compare_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_module, "OverlapSearch", lambda routes: OverlapSearch(routes, most_work=1))

    found = rules(command("a", "a.**.commands", "x"), command("b", "b.**.commands", "y"))

    assert found == [(LintRule.TOO_MANY_TO_COMPARE, "commands")]


def test_several_double_stars_are_hard_to_foresee() -> None:
    [finding] = lint(table_of(event("r", "**.order.**"), event("fine", "*.events.**")))

    assert (finding.level, finding.rule, finding.subject) == (LintLevel.WARNING, LintRule.MANY_DOUBLE_STARS, "r")
    assert finding.message == "**.order.** has 2 times '**': hard to foresee what it takes"


def test_a_dispatcher_without_an_enabled_route_is_named() -> None:
    table = RouteTable(
        [event("on", "a.events", "used"), event("off", "b.events", "off", enabled=False)],
        {name: DispatcherTypes(EVENT) for name in ("used", "off", "idle")},
    )

    assert [(finding.rule, finding.subject) for finding in lint(table)] == [
        (LintRule.NO_ROUTE, "idle"),
        (LintRule.NO_ROUTE, "off"),
    ]


def test_disabled_routes_are_left_alone() -> None:
    assert rules(event("off", "a.b", enabled=False), event("on", "a.events")) == []


def test_errors_stand_before_warnings() -> None:
    findings = lint(table_of(event("stars", "**.a.**"), event("z", "nothing")))

    assert [finding.level for finding in findings] == [LintLevel.ERROR, LintLevel.WARNING]
