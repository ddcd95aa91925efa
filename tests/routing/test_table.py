"""The table: what it matches, in which order, with which version, however it was made."""

import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable

EVENT, COMMAND, INTENT = MessageCategory.EVENT, MessageCategory.COMMAND, MessageCategory.INTENT
TYPES = ["A", "B", "C"]

segment_texts = st.sampled_from(["a", "b", "c", "A", "*", "**", "**", "a*", "?b", "[ab]c", "[!a]", "*b*"])
globs = st.lists(segment_texts, min_size=1, max_size=5).map(".".join)
regexes = st.sampled_from(["regex:a.*", "regex:A\\.(b|c)", "regex:.*[bc]", "regex:a|b", "regex:(a\\.)*c"])
categories = st.sampled_from(list(MessageCategory))
topics = st.lists(st.sampled_from(["a", "b", "c", "B", "ab", "ac", "bc", ""]), min_size=1, max_size=5).map(".".join)
messages = st.tuples(topics, categories, st.none() | st.sampled_from(TYPES))
dispatcher_types = st.none() | st.frozensets(st.sampled_from(TYPES), max_size=2)


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[DispatchRoute], dict[str, DispatcherTypes]]:
    """Some routes with ids of their own, and the dispatchers that they name."""
    dispatchers = {f"d{i}": DispatcherTypes(draw(categories), draw(dispatcher_types)) for i in range(3)}
    routes = [
        DispatchRoute(
            route_id=route_id,
            topic_pattern=draw(globs | globs | globs | regexes),
            message_category=draw(categories),
            dispatcher_id=draw(st.sampled_from(sorted(dispatchers))),
            message_type=draw(st.none() | st.sampled_from(TYPES)),
            priority=draw(st.integers(-1, 1)),
            enabled=draw(st.sampled_from([True, True, True, False])),
        )
        for route_id in draw(st.lists(st.text("xyz", min_size=1, max_size=3), max_size=10, unique=True))
    ]
    return routes, dispatchers


def expression_of(pattern: str) -> str:
    """A plain translation of a pattern for `topic + "."`; it shares nothing with the library."""
    if pattern.startswith("regex:"):
        return f"(?:{pattern.removeprefix('regex:')})\\."
    expression = ""
    for segment in pattern.lower().split("."):
        if segment == "**":
            expression += r"(?:[^.]+\.)*"
        elif segment == "*":
            expression += r"[^.]+\."
        else:
            expression += segment.replace("[!", "[^.").replace("?", "[^.]").replace("*", "[^.]*") + r"\."
    return expression


def order_of(route: DispatchRoute) -> tuple[Any, ...]:
    """The documented order, counted anew from the text."""
    if route.topic_pattern.startswith("regex:"):
        return (-route.priority, 2, 0, 0, 0, 0, route.route_id)
    segments = route.topic_pattern.split(".")
    rests, stars = segments.count("**"), segments.count("*")
    partials = sum(segment not in ("*", "**") and not segment.isalnum() for segment in segments)
    literals = len(segments) - rests - stars - partials
    return (-route.priority, int(literals < len(segments)), rests, stars, partials, -literals, route.route_id)


def expected_match(
    routes: Sequence[DispatchRoute],
    dispatchers: dict[str, DispatcherTypes],
    topic: str,
    category: MessageCategory,
    message_type: str | None,
) -> list[DispatchRoute]:
    if "" in topic.split("."):
        return []
    fitting = [
        route
        for route in routes
        if route.enabled
        and route.message_category is category
        and route.message_type in (None, message_type)
        and (
            (accepted := dispatchers[route.dispatcher_id].message_types) is None
            or (message_type is not None and message_type in accepted)
        )
        and re.fullmatch(expression_of(route.topic_pattern), f"{topic}.", re.IGNORECASE)
    ]
    return sorted(fitting, key=order_of)


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


def table_of(*routes: DispatchRoute, **more: Any) -> RouteTable:
    return RouteTable(routes, {one.dispatcher_id: DispatcherTypes(one.message_category) for one in routes}, **more)


def ids(routes: Sequence[DispatchRoute]) -> list[str]:
    return [one.route_id for one in routes]


@given(contents(), st.lists(messages, min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_matching_agrees_with_a_plain_reference(
    content: tuple[list[DispatchRoute], dict[str, DispatcherTypes]],
    asked: list[tuple[str, MessageCategory, str | None]],
) -> None:
    routes, dispatchers = content
    table = RouteTable(routes, dispatchers)

    for topic, category, message_type in asked:
        expected = expected_match(routes, dispatchers, topic, category, message_type)
        firsts = {one.dispatcher_id: one for one in reversed(expected)}
        chosen = [one for one in expected if firsts[one.dispatcher_id] is one]

        assert ids(table.match(topic, category, message_type)) == ids(expected)
        assert table.first(topic, category, message_type) == (expected[0] if expected else None)
        selected = table.select(topic, category, message_type)
        assert ids(selected) == ids(chosen[:1] if category is COMMAND else chosen)


@given(contents(), st.randoms(use_true_random=False), messages)
@settings(max_examples=80, deadline=None)
def test_the_order_of_registration_plays_no_part(
    content: tuple[list[DispatchRoute], dict[str, DispatcherTypes]],
    random: Any,
    message: tuple[str, MessageCategory, str | None],
) -> None:
    routes, dispatchers = content
    shuffled, shuffled_dispatchers = list(routes), list(dispatchers.items())
    random.shuffle(shuffled)
    random.shuffle(shuffled_dispatchers)

    one, other = RouteTable(routes, dispatchers), RouteTable(shuffled, dict(shuffled_dispatchers))

    assert one.version == other.version
    assert one == other
    assert one.routes == other.routes
    assert one.match(*message) == other.match(*message)
    assert one.select(*message) == other.select(*message)


@given(contents(), messages)
@settings(max_examples=80, deadline=None)
def test_pickling_keeps_version_and_matches(
    content: tuple[list[DispatchRoute], dict[str, DispatcherTypes]], message: tuple[str, MessageCategory, str | None]
) -> None:
    table = RouteTable(*content, cache_entries=7)
    table.match(*message)

    restored = pickle.loads(pickle.dumps(table))

    assert restored.version == table.version
    assert restored.routes == table.routes
    assert restored.dispatchers == table.dispatchers
    assert restored.match(*message) == table.match(*message)
    assert restored.select(*message) == table.select(*message)


@given(contents(), st.lists(messages, min_size=1, max_size=12), st.integers(0, 6))
@settings(max_examples=80, deadline=None)
def test_a_small_cache_changes_no_answer_and_stays_small(
    content: tuple[list[DispatchRoute], dict[str, DispatcherTypes]],
    asked: list[tuple[str, MessageCategory, str | None]],
    cache_entries: int,
) -> None:
    cold = [RouteTable(*content).match(*message) for message in asked]
    table = RouteTable(*content, cache_entries=cache_entries)

    answers = [[table.match(*message) for message in asked] for _ in range(3)]

    assert answers == [cold, cold, cold]
    assert len(table._recent) + len(table._older) <= cache_entries + 2


def test_ten_thousand_topics_do_not_outgrow_the_cache() -> None:
    table = table_of(route("all", "**"), cache_entries=100)

    for i in range(10_000):
        table.match(f"topic.{i}", EVENT)

    assert len(table._recent) + len(table._older) <= 100
    assert ids(table.match("topic.0", EVENT)) == ["all"]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_version_is_the_same_in_another_process(seed: str) -> None:
    program = (
        "from raydispatch.routing.route import DispatchRoute as R\n"
        "from raydispatch.routing.table import *\n"
        "types = frozenset({'A', 'B', 'C', 'D', 'E', 'F'})\n"
        "routes = [R(route_id=f'r{i}', topic_pattern=f'a.{i}.**', message_category='event', dispatcher_id='d',\n"
        "            metadata={'x': '1', 'y': '2'}) for i in range(9)]\n"
        "print(RouteTable(routes, {'d': DispatcherTypes(MessageCategory.EVENT, types)}).version)\n"
    )
    types = frozenset("FEDCBA")
    routes = [route(f"r{i}", f"a.{i}.**", metadata={"y": "2", "x": "1"}) for i in reversed(range(9))]
    here = RouteTable(routes, {"d": DispatcherTypes(EVENT, types)}).version

    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
    there = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()

    assert there == here
    assert re.fullmatch("[0-9a-f]{16}", here)


@pytest.mark.parametrize(
    "change",
    [
        {"topic_pattern": "b.**"},
        {"priority": 1},
        {"enabled": False},
        {"message_type": "A"},
        {"metadata": {"x": "1"}},
        {"description": "d"},
    ],
)
def test_another_content_is_another_version(change: dict[str, Any]) -> None:
    one = route("r", "a.**")
    table = table_of(one)

    assert table_of(one.model_copy(update=change)).version != table.version
    assert RouteTable([one], {"d": DispatcherTypes(EVENT, frozenset("A"))}).version != table.version
    assert table_of(one, cache_entries=1).version == table.version


def test_every_route_that_fits_is_matched_in_order() -> None:
    table = table_of(
        route("rest", "dev.**"),
        route("exact", "dev.a.events"),
        route("star", "dev.*.events"),
        route("partial", "dev.a*.events"),
        route("rests", "**.a.**"),
        route("regex", "regex:DEV\\..*"),
        route("first", "**", priority=5),
        route("off", "dev.a.events", enabled=False),
        route("elsewhere", "prod.**"),
    )

    found = table.match("DEV.a.Events", EVENT)

    assert ids(found) == ["first", "exact", "partial", "star", "rest", "rests", "regex"]


def test_a_dispatcher_matched_twice_is_selected_once() -> None:
    table = table_of(route("one", "**", "x"), route("two", "a.*", "x"), route("three", "*.b", "y"))

    assert ids(table.select("a.b", EVENT)) == ["three", "two"]
    assert ids(table.match("a.b", EVENT)) == ["three", "two", "one"]


def test_a_command_has_one_dispatcher() -> None:
    table = table_of(
        route("one", "**", "x", message_category=COMMAND), route("two", "a.*", "y", message_category=COMMAND)
    )

    first = table.first("a.b", COMMAND)

    assert ids(table.match("a.b", COMMAND)) == ["two", "one"]
    assert ids(table.select("a.b", COMMAND)) == ["two"]
    assert first is not None
    assert first.route_id == "two"
    assert table.match("a.b", EVENT) == ()


def test_types_must_pass_the_route_and_its_dispatcher() -> None:
    routes = [route("any", "a"), route("typed", "a", message_type="A"), route("never", "a", message_type="C")]
    table = RouteTable(routes, {"d": DispatcherTypes(EVENT, frozenset({"A", "B"}))})

    assert ids(table.match("a", EVENT, "A")) == ["any", "typed"]
    assert ids(table.match("a", EVENT, "B")) == ["any"]
    assert ids(table.match("a", EVENT, "C")) == []
    assert ids(table.match("a", EVENT)) == []
    assert [table.types_of(one) for one in routes] == [frozenset("AB"), frozenset("A"), frozenset()]


@pytest.mark.parametrize("topic", ["", ".", "a.", ".a", "a..b", "a\n", "a" * 501, "\ud800"])
def test_a_malformed_topic_matches_nothing(topic: str) -> None:
    table = table_of(route("all", "**"), route("many", "**.**"), route("regex", "regex:(?s).*"), route("star", "*"))

    assert table.match(topic, EVENT) == ()
    assert table.first(topic, EVENT) is None
    assert table.select(topic, EVENT) == ()


def test_many_patterns_with_several_rests_need_more_than_one_automaton() -> None:
    table = table_of(*(route(f"r{i}", f"**.s{i}.**") for i in range(1_100)))

    assert ids(table.match("s3.x.s1099", EVENT)) == ["r1099", "r3"]


def test_a_regular_expression_must_fit_the_whole_topic() -> None:
    table = table_of(route("regex", "regex:dev\\..*|prod"))

    assert ids(table.match("DEV.a", EVENT)) == ["regex"]
    assert ids(table.match("prod", EVENT)) == ["regex"]
    assert ids(table.match("prod.a", EVENT)) == []
    assert ids(table.match("x.dev.a", EVENT)) == []


def test_an_empty_table_matches_nothing() -> None:
    table = RouteTable([], {})

    assert table.match("a.events", EVENT) == ()
    assert len(table) == 0
    assert repr(table) == f"<RouteTable {table.version}: 0 routes, 0 dispatchers>"


def test_equal_tables_are_one_key() -> None:
    one, same, other = table_of(route("r", "a")), table_of(route("r", "a")), table_of(route("r", "b"))

    assert {one, same, other} == {one, other}
    assert one != "table"
