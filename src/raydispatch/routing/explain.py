"""Explain: why a message goes where it goes, and why not elsewhere."""

from difflib import get_close_matches
from typing import NamedTuple

from raydispatch.messages.topic import MessageCategory, category_of, topic_fault
from raydispatch.routing.pattern import PatternKind
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import RouteTable

_SUGGESTIONS = 3
_MOST_COMPARED = 5_000


class RouteVerdict(NamedTuple):
    """What a route has to do with a message, and why."""

    route: DispatchRoute
    reason: str


class Explanation(NamedTuple):
    """The whole answer to "who gets this?"."""

    topic: str
    message_type: str | None
    category: MessageCategory | None
    fault: str | None
    """Why the topic can't be routed at all, if so."""
    selected: tuple[RouteVerdict, ...]
    """Whose dispatchers run, in order."""
    passed_over: tuple[RouteVerdict, ...]
    """Whose pattern fits, and who yet play no part."""
    similar: tuple[DispatchRoute, ...]
    """If nothing fits: the patterns that look most like the topic."""
    table_version: str


def explain(table: RouteTable, topic: str, message_type: str | None = None) -> Explanation:
    """Tell who gets a message with this topic and type. No dispatcher is called."""
    category = category_of(topic)
    chosen = table.select(topic, category, message_type) if category else ()
    fitting = [route for route in table.routes if route.matches_topic(topic)]
    return Explanation(
        topic=topic,
        message_type=message_type,
        category=category,
        fault=topic_fault(topic),
        selected=tuple(RouteVerdict(route, _why_here(route, i)) for i, route in enumerate(chosen)),
        passed_over=tuple(
            RouteVerdict(route, _why_not(table, route, category, message_type, chosen))
            for route in fitting
            if route not in chosen
        ),
        similar=() if fitting else _similar(table, topic),
        table_version=table.version,
    )


def _why_here(route: DispatchRoute, position: int) -> str:
    pattern = route.pattern
    words = {PatternKind.EXACT: "exact topic", PatternKind.GLOB: "pattern", PatternKind.REGEX: "regular expression"}
    order = "first" if position == 0 else f"number {position + 1}"
    return f"{order} in order: priority {route.priority}, {words[pattern.kind]}"


def _why_not(
    table: RouteTable,
    route: DispatchRoute,
    category: MessageCategory | None,
    message_type: str | None,
    chosen: tuple[DispatchRoute, ...],
) -> str:
    if not route.enabled:
        return "the route is disabled"
    if route.message_category is not category:
        return f"it is for the category {route.message_category}"
    if route.message_type is not None and route.message_type != message_type:
        return f"it is for the type {route.message_type}"
    types = table.dispatchers[route.dispatcher_id].message_types
    if types is not None and message_type not in types:
        return f"its dispatcher takes {', '.join(sorted(types)) or 'no type at all'} only"
    winner = next((other for other in chosen if other.dispatcher_id == route.dispatcher_id), None)
    if winner is not None:
        return f"its dispatcher runs already, by '{winner.route_id}'"
    return f"a command has one dispatcher, and '{chosen[0].route_id}' comes first"


def _similar(table: RouteTable, topic: str) -> tuple[DispatchRoute, ...]:
    by_pattern = {route.topic_pattern: route for route in reversed(table.routes[:_MOST_COMPARED])}
    close = get_close_matches(topic, by_pattern, n=_SUGGESTIONS, cutoff=0.4)
    return tuple(by_pattern[text] for text in close)
