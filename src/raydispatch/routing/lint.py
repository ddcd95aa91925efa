"""Lint: what is allowed in a table, and yet most likely not meant."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from raydispatch.messages.topic import MessageCategory, category_of_segment
from raydispatch.routing.overlap import OverlapSearch, covers
from raydispatch.routing.pattern import Pattern, PatternKind, SegmentKind, sample_segment
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable

MOST_OVERLAPS = 100


class LintLevel(StrEnum):
    """An error can never work; a warning may be meant."""

    ERROR = "error"
    WARNING = "warning"


class LintRule(StrEnum):
    """What lint looks for."""

    UNREACHABLE = "unreachable"
    SHADOWED = "shadowed"
    OVERLAPPING = "overlapping"
    MANY_DOUBLE_STARS = "many-double-stars"
    NO_ROUTE = "no-route"
    TOO_MANY_TO_COMPARE = "too-many-to-compare"


class Finding(NamedTuple):
    """One thing that is most likely not meant."""

    level: LintLevel
    rule: LintRule
    subject: str
    """The id of the route or dispatcher."""
    message: str


def lint(table: RouteTable) -> list[Finding]:
    """Look a table through. Disabled routes are left out, and so are regular expressions where routes are compared."""
    routes = [route for route in table.routes if route.enabled]
    findings = [
        *_unreachable(table, routes),
        *_shadowed(table, routes),
        *_overlapping(table),
        *_many_double_stars(routes),
        *_without_routes(table, routes),
    ]
    return sorted(findings, key=lambda finding: (finding.level, finding.rule, finding.subject))


class CommandOverlap(NamedTuple):
    """Two command routes of different dispatchers that can take the same message."""

    winner: DispatchRoute
    loser: DispatchRoute

    def __str__(self) -> str:
        winner, loser = self
        return (
            f"commands on {winner.topic_pattern} and {loser.topic_pattern} can meet: "
            f"'{winner.route_id}' ({winner.dispatcher_id}) wins over '{loser.route_id}' ({loser.dispatcher_id})"
        )


def command_overlaps(table: RouteTable, most: int = MOST_OVERLAPS) -> tuple[list[CommandOverlap], bool]:
    """Where more than one dispatcher could take a command; and whether all pairs of routes could be compared."""
    commands = [r for r in table.routes if r.enabled and r.message_category is MessageCategory.COMMAND]
    search = OverlapSearch(commands)
    found = (
        CommandOverlap(*sorted(pair, key=lambda route: route.order))
        for pair in search.pairs()
        if pair[0].dispatcher_id != pair[1].dispatcher_id and _types_meet(table, *pair)
    )
    return list(islice(found, most)), search.complete


def _unreachable(table: RouteTable, routes: list[DispatchRoute]) -> Iterator[Finding]:
    for route in routes:
        if table.types_of(route) == frozenset():
            yield Finding(
                LintLevel.ERROR, LintRule.UNREACHABLE, route.route_id,
                f"it asks for {route.message_type}, which the dispatcher '{route.dispatcher_id}' does not take",
            )  # fmt: skip
        elif not _can_have_category(route.pattern, route.message_category):
            yield Finding(
                LintLevel.ERROR, LintRule.UNREACHABLE, route.route_id,
                f"no topic that fits {route.topic_pattern} is of the category {route.message_category}",
            )  # fmt: skip


def _can_have_category(pattern: Pattern, category: MessageCategory) -> bool:
    if pattern.kind is PatternKind.REGEX:
        return True
    for segment in reversed(pattern.segments):
        if segment.kind is SegmentKind.LITERAL:
            if named := category_of_segment(segment.text):
                return named is category
        elif segment.accepts(category.value) or segment.accepts(f"{category.value}s"):
            return True
    return False


def _shadowed(table: RouteTable, routes: list[DispatchRoute]) -> Iterator[Finding]:
    # A route that covers another matches every topic of it, so also this one topic: only those need a closer look.
    everything = {route.route_id: route.model_copy(update={"message_type": None}) for route in routes}
    originals = {route.route_id: route for route in routes}
    untyped = RouteTable(
        everything.values(), {name: types._replace(message_types=None) for name, types in table.dispatchers.items()}
    )
    for route in routes:
        if route.pattern.kind is PatternKind.REGEX:
            continue
        for candidate in untyped.match(_example(route.pattern), route.message_category):
            earlier = originals[candidate.route_id]
            if earlier is not route and earlier.order < route.order and _makes_needless(table, earlier, route):
                yield Finding(LintLevel.WARNING, LintRule.SHADOWED, route.route_id, _why_needless(earlier, route))
                break


def _example(pattern: Pattern) -> str:
    """A topic that fits."""
    singles = [sample_segment(segment) for segment in pattern.segments if segment.kind is not SegmentKind.REST]
    return ".".join(singles or ["x"])


def _makes_needless(table: RouteTable, earlier: DispatchRoute, route: DispatchRoute) -> bool:
    if earlier.dispatcher_id != route.dispatcher_id and route.message_category is not MessageCategory.COMMAND:
        return False
    wide, narrow = table.types_of(earlier), table.types_of(route)
    types_covered = wide is None or (narrow is not None and narrow <= wide)
    return types_covered and covers(earlier.pattern, route.pattern)


def _why_needless(earlier: DispatchRoute, route: DispatchRoute) -> str:
    if earlier.dispatcher_id == route.dispatcher_id:
        return (
            f"it adds nothing: '{earlier.route_id}' sends all of {route.topic_pattern} to the same dispatcher already"
        )
    return f"it never wins: '{earlier.route_id}' ({earlier.topic_pattern}) comes first and takes all of its commands"


def _overlapping(table: RouteTable) -> Iterator[Finding]:
    found, complete = command_overlaps(table)
    for overlap in found:
        yield Finding(LintLevel.WARNING, LintRule.OVERLAPPING, overlap.loser.route_id, str(overlap))
    if not complete:
        yield Finding(
            LintLevel.WARNING, LintRule.TOO_MANY_TO_COMPARE, "commands", "not all pairs of command routes were compared"
        )


def _types_meet(table: RouteTable, one: DispatchRoute, other: DispatchRoute) -> bool:
    mine, theirs = table.types_of(one), table.types_of(other)
    if mine is None or theirs is None:
        return mine != frozenset() and theirs != frozenset()
    return bool(mine & theirs)


def _many_double_stars(routes: list[DispatchRoute]) -> Iterator[Finding]:
    for route in routes:
        count = sum(segment.kind is SegmentKind.REST for segment in route.pattern.segments)
        if count > 1:
            yield Finding(
                LintLevel.WARNING, LintRule.MANY_DOUBLE_STARS, route.route_id,
                f"{route.topic_pattern} has {count} times '**': hard to foresee what it takes",
            )  # fmt: skip


def _without_routes(table: RouteTable, routes: list[DispatchRoute]) -> Iterator[Finding]:
    routed = {route.dispatcher_id for route in routes}
    for dispatcher_id in table.dispatchers:
        if dispatcher_id not in routed:
            yield Finding(LintLevel.WARNING, LintRule.NO_ROUTE, dispatcher_id, "no enabled route leads to it")
