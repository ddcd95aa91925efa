"""Overlap and cover agree with trying all short topics."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.overlap import OverlapSearch, covers, overlaps
from raydispatch.routing.pattern import Pattern, parse_pattern
from raydispatch.routing.route import DispatchRoute

SEGMENTS = ["a", "b", "*", "**", "a*", "*b", "?b", "[ab]", "[!a]", "[!a]b"]
# A word for each way in which up to three characters can differ for the segments above ("x" is neither a nor b).
WORDS = ["a", "b", "x", "ab", "bb", "xb", "aa", "ax", "axb"]
TOPICS = [".".join(words) for length in (1, 2, 3) for words in product(WORDS, repeat=length)]
LONGER = [".".join(words) for length in (4, 5, 6) for words in product(["a", "b"], repeat=length)]

patterns = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map(lambda parts: parse_pattern(".".join(parts)))


def route(route_id: str, pattern: str) -> DispatchRoute:
    return DispatchRoute(
        route_id=route_id, topic_pattern=pattern, message_category=MessageCategory.COMMAND, dispatcher_id="d"
    )


@given(patterns, patterns)
@settings(max_examples=120, deadline=None)
def test_overlap_is_a_topic_in_common(one: Pattern, other: Pattern) -> None:
    common = any(one.matches(topic) and other.matches(topic) for topic in TOPICS + LONGER)

    if common:
        assert overlaps(one, other)
    elif not (any(part.text == "**" for part in one.segments) and any(part.text == "**" for part in other.segments)):
        # If one has a fixed length of up to three, the topics above are all that matter.
        assert not overlaps(one, other)
    assert overlaps(one, other) == overlaps(other, one)


@given(patterns, patterns)
@settings(max_examples=150, deadline=None)
def test_cover_is_never_wrongly_true(wide: Pattern, narrow: Pattern) -> None:
    if covers(wide, narrow):
        assert all(wide.matches(topic) for topic in TOPICS + LONGER if narrow.matches(topic))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("a", "A"),
        ("*", "a"),
        ("*", "a*"),
        ("**", "a.b.c"),
        ("**", "**.a.*"),
        ("a.**", "a"),
        ("a.**", "a.**.b"),
        ("a*", "ab"),
        ("a*.x", "a*.x"),
        ("**.b.**", "a.b"),
    ],
)
def test_a_wider_pattern_covers(wide: str, narrow: str) -> None:
    assert covers(parse_pattern(wide), parse_pattern(narrow))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [("a", "*"), ("*", "**"), ("*", "a.b"), ("a.**", "**"), ("a*", "b*"), ("a*", "*"), ("**.b", "**"), ("[ab]", "?")],
)
def test_a_pattern_that_misses_some_does_not_cover(wide: str, narrow: str) -> None:
    assert not covers(parse_pattern(wide), parse_pattern(narrow))


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("[a-c]", "[c-e]", True),
        ("[a-c]", "[d-e]", False),
        ("[a-c]", "[!a-b]", True),
        ("[a-c]", "[!a-c]", False),
        ("a*", "*b", True),
        ("a*c", "?", False),
        ("*a*b", "b*a", False),
        ("a.**.b", "a.**.c", False),
        ("a.**", "**.b", True),
        ("a.*", "a", False),
        ("a.**", "a", True),
    ],
)
def test_known_pairs_meet_or_do_not(one: str, other: str, meet: bool) -> None:
    assert overlaps(parse_pattern(one), parse_pattern(other)) is meet
    assert overlaps(parse_pattern(other), parse_pattern(one)) is meet


def test_regular_expressions_are_not_compared() -> None:
    expression, everything = parse_pattern("regex:a"), parse_pattern("**")

    assert not overlaps(expression, everything)
    assert not overlaps(everything, expression)
    assert not covers(everything, expression)
    assert not covers(expression, expression)


def ids_of(pairs: Any) -> list[frozenset[str]]:
    return sorted((frozenset((one.route_id, other.route_id)) for one, other in pairs), key=sorted)


@given(st.lists(patterns, max_size=10))
@settings(max_examples=150, deadline=None)
def test_the_search_finds_each_pair_that_overlaps_once(chosen: list[Pattern]) -> None:
    routes = [route(f"r{i}", pattern.text) for i, pattern in enumerate(chosen)]
    search = OverlapSearch(routes)

    found = ids_of(search.pairs())

    pairs = [(one, other) for one, other in combinations(routes, 2) if overlaps(one.pattern, other.pattern)]
    assert found == ids_of(pairs)
    assert search.complete


def test_the_search_leaves_regular_expressions_out() -> None:
    search = OverlapSearch([route("one", "regex:a"), route("two", "a"), route("three", "**")])

    assert ids_of(search.pairs()) == [frozenset({"two", "three"})]


def test_a_search_that_ran_out_of_work_says_so() -> None:
    search = OverlapSearch([route(f"r{i}", "**") for i in range(10)], most_work=20)

    assert len(list(search.pairs())) < 45
    assert not search.complete
