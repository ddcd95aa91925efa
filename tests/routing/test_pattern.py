"""Patterns: what they match, how specific they are, and how a bad one is refused."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.errors import InvalidPattern
from raydispatch.routing.pattern import (
    MAX_PATTERN_LENGTH,
    PatternKind,
    Segment,
    SegmentKind,
    parse_pattern,
    partial_matcher,
    sample_segment,
)


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("a.b", "a.b"),
        ("a.b", "A.B"),
        ("DEV.Order", "dev.oRDER"),
        ("a.*", "a.b"),
        ("a.**", "a"),
        ("a.**", "a.b.c"),
        ("**", "a"),
        ("**", "a.b.c"),
        ("**.b", "b"),
        ("**.b", "b.a.b"),
        ("a.**.c", "a.c"),
        ("a.**.c", "a.c.b.c"),
        ("**.b.**", "b"),
        ("**.b.**.d.**", "a.b.c.d.e"),
        ("**.**", "a"),
        ("a*", "a"),
        ("a*", "ABC"),
        ("*a*b", "xaxbab"),
        ("?b", "ab"),
        ("[ab]c", "Bc"),
        ("[A-C]x", "bx"),
        ("[!a]", "b"),
        ("[a-]", "-"),
        ("[*]", "*"),
        ("[[]x", "[x"),
        ("a]", "a]"),
        ("straße", "STRASSE"),
        ("regex:a\\.b+", "A.BBB"),
        ("regex:A|B", "b"),
    ],
)
def test_a_pattern_takes_a_topic_that_fits(pattern: str, topic: str) -> None:
    assert parse_pattern(pattern).matches(topic)


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("a.b", "a.b.c"),
        ("a.b", "a"),
        ("a.*", "a"),
        ("a.*", "a.b.c"),
        ("*", "a.b"),
        ("a.**", "b.a"),
        ("**.b.**.d.**", "a.d.c.b.e"),
        ("*.**.*", "a"),
        ("a*", "ba"),
        ("a*", "a.b"),
        ("?b", "b"),
        ("[ab]c", "cc"),
        ("[!a]", "a"),
        ("[!A]", "a"),
        ("[!a]", "bb"),
        ("regex:a", "a.b"),
        ("regex:b", "a.b"),
        ("regex:a|b", "bc"),
        ("regex:.*", "a..b"),
    ],
)
def test_a_pattern_leaves_a_topic_that_does_not_fit(pattern: str, topic: str) -> None:
    assert not parse_pattern(pattern).matches(topic)


@pytest.mark.parametrize("topic", ["", ".", "a.", ".a", "a..b", "a\n", "a" * 501, "\ud800"])
@pytest.mark.parametrize("pattern", ["**", "*", "a*", "*.*", "**.**", "regex:(?s).*"])
def test_a_malformed_topic_fits_nothing(pattern: str, topic: str) -> None:
    assert not parse_pattern(pattern).matches(topic)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "it is empty"),
        ("  ", 0, "it is empty"),
        ("a..b", 2, "a segment is empty here"),
        (".a", 0, "a segment is empty here"),
        ("a.", 1, "a segment is empty here"),
        ("a**", 1, "'**' must be a whole segment"),
        ("x.**a", 2, "'**' must be a whole segment"),
        ("***", 0, "'**' must be a whole segment"),
        ("a.b[c", 3, "this '[' has no ']' in its segment"),
        ("a.[b.c]", 2, "this '[' has no ']' in its segment"),
        ("a.[ab]x[c", 7, "this '[' has no ']' in its segment"),
        ("a.[]", 2, "this class is empty"),
        ("a.x[!]", 3, "this class is empty"),
        ("a.[z-a]", 2, "the range z-a is empty"),
        ("a.[ß]", 2, "this class has a character that folds into several"),
        ("x" * 501, 500, "it has more than 500 characters"),
        ("a\tb", 1, "this character does not print, so no topic can have it"),
        ("ab.\x00", 3, "this character does not print, so no topic can have it"),
        ("regex:", 5, "there is no regular expression after the prefix"),
        ("regex:a(b", 6, "missing )"),
        ("regex:a)(b", 6, "unexpected )"),
        ("regex:xa[z-b]", 9, "invalid character class range"),
        ("regex:ab**", 8, "bad repetition operator"),
        ("regex:(a)\\1", 9, "invalid escape sequence"),
    ],
)
def test_a_bad_pattern_is_refused_with_a_caret_under_the_fault(text: str, position: int, reason: str) -> None:
    with pytest.raises(InvalidPattern) as caught:
        parse_pattern(text)

    error = caught.value
    first, line, caret = str(error).split("\n")
    assert (error.pattern, error.position, error.reason) == (text, position, reason)
    assert first == f"Invalid topic pattern: {reason}."
    column = caret.index("^")
    assert caret.strip() == "^"
    pointed_at = text[position : position + 1]
    assert line[column : column + 1] == (pointed_at if pointed_at.isprintable() else "�")


def test_a_refusal_survives_pickling() -> None:
    error = InvalidPattern("a..b", 2, "a segment is empty here")

    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_longest_allowed_pattern_is_read() -> None:
    assert parse_pattern("x" * MAX_PATTERN_LENGTH).kind is PatternKind.EXACT


@pytest.mark.parametrize(
    ("text", "specificity"),
    [
        ("a.b", (PatternKind.EXACT, 0, 0, 0, -2)),
        ("a.*.**", (PatternKind.GLOB, 1, 1, 0, -1)),
        ("a*.?.[ab].**.**", (PatternKind.GLOB, 2, 0, 3, 0)),
        ("regex:a", (PatternKind.REGEX, 0, 0, 0, 0)),
    ],
)
def test_specificity_counts_what_the_pattern_leaves_open(text: str, specificity: tuple[int, ...]) -> None:
    assert parse_pattern(text).specificity == specificity


def test_many_stars_in_a_segment_do_not_backtrack() -> None:
    pattern = parse_pattern("*a" * 60 + "*b")

    # With backtracking this would not end in a lifetime.
    assert not pattern.matches("a" * 400)
    assert pattern.matches("a" * 400 + "b")


pieces = st.lists(st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]", "[b-c]"]), min_size=1, max_size=5).map("".join)


def regex_of_partial(text: str) -> str:
    """The plain translation, which may backtrack."""
    return text.replace("[!", "[^").replace("?", ".").replace("*", ".*")


@given(pieces.filter(lambda text: "**" not in text and text != "*"), st.text("abc", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_partial_segment_is_its_plain_regular_expression(text: str, segment: str) -> None:
    expected = re.fullmatch(regex_of_partial(text), segment) is not None

    assert (partial_matcher(text)(segment) is not None) == expected
    assert parse_pattern(text).matches(segment) == expected


@given(pieces.filter(lambda text: "**" not in text))
@settings(max_examples=100, deadline=None)
def test_a_sample_is_accepted_by_its_segment(text: str) -> None:
    [segment] = parse_pattern(text).segments

    assert segment.accepts(sample_segment(segment))


def test_a_sample_of_a_negated_class_avoids_all_that_it_excludes() -> None:
    segment = Segment(SegmentKind.PARTIAL, "[!a-z0]")

    assert segment.accepts(sample_segment(segment))
