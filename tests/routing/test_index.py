"""The index finds what matching pattern by pattern finds, whenever the patterns were added."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.errors import InvalidState
from raydispatch.routing import index as index_module
from raydispatch.routing.index import PatternIndex
from raydispatch.routing.pattern import parse_pattern

segment_texts = st.sampled_from(["a", "b", "c", "*", "**", "**", "a*", "?b", "[ab]c", "[!a]"])
globs = st.lists(segment_texts, min_size=1, max_size=5).map(".".join)
regexes = st.sampled_from(["regex:a.*", "regex:A\\.(b|c)", "regex:.*[bc]", "regex:a|b", "regex:(a\\.)*c"])
patterns = st.lists(globs | globs | globs | regexes, max_size=8)
topics = st.lists(st.sampled_from(["a", "b", "c", "ab", "ac", "bc"]), min_size=1, max_size=5)


def index_of(*texts: str) -> PatternIndex[str]:
    index: PatternIndex[str] = PatternIndex()
    add(index, *texts)
    return index


def add(index: PatternIndex[str], *texts: str) -> None:
    for text in texts:
        index.leaf(parse_pattern(text), lambda text=text: text)  # type: ignore[misc]


def fits(pattern: str, topic: str) -> bool:
    """A plain translation for `topic + "."`; it shares nothing with the library."""
    if pattern.startswith("regex:"):
        expression = f"(?:{pattern.removeprefix('regex:')})\\."
    else:
        wildcards = {"**": r"(?:[^.]+\.)*", "*": r"[^.]+\."}
        expression = "".join(
            wildcards.get(segment) or segment.replace("[!", "[^.").replace("?", "[^.]").replace("*", "[^.]*") + r"\."
            for segment in pattern.split(".")
        )
    return re.fullmatch(expression, f"{topic}.", re.IGNORECASE) is not None


@given(st.lists(st.tuples(patterns, topics), min_size=1, max_size=4), st.sampled_from([1, 2, 1_024]))
@settings(max_examples=300, deadline=None)
def test_patterns_may_be_added_between_searches(rounds: list[tuple[list[str], list[str]]], width: int) -> None:
    index = index_of()
    added: set[str] = set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_AUTOMATON_WIDTH", width)
        for texts, topic in rounds:
            add(index, *texts)
            added.update(texts)

            assert sorted(index.find(topic)) == sorted(text for text in added if fits(text, ".".join(topic)))


@given(patterns, topics)
@settings(max_examples=150, deadline=None)
def test_a_compact_index_finds_the_same(texts: list[str], topic: list[str]) -> None:
    loose, compact = index_of(*texts), index_of(*texts)

    compact.compact()

    assert sorted(compact.find(topic)) == sorted(loose.find(topic))


@pytest.mark.parametrize("pattern", ["a.b", "a.*", "a.**", "**.a.**", "regex:a\\..*"])
def test_equal_patterns_share_a_leaf(pattern: str) -> None:
    index: PatternIndex[list[int]] = PatternIndex()

    leaf = index.leaf(parse_pattern(pattern), list)
    again = index.leaf(parse_pattern(pattern), list)
    index.find(["a", "b"])
    later = index.leaf(parse_pattern(pattern), list)

    assert leaf is again is later
    assert index.find(["a", "b"]) == [leaf]


@pytest.mark.parametrize("pattern", ["A.b", "a*.B", "A.**", "**.A.**"])
def test_case_does_not_make_another_pattern(pattern: str) -> None:
    index: PatternIndex[list[int]] = PatternIndex()

    assert index.leaf(parse_pattern(pattern), list) is index.leaf(parse_pattern(pattern.swapcase()), list)


def test_only_what_was_added_to_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_AUTOMATON_WIDTH", 2)
    index = index_of("**.a.**", "**.b.**", "**.c.**", "regex:a")
    index.find(["a"])
    automata, regex_set = list(index._automata), index._regex_set

    add(index, "a", "*.b", "**.a.**", "regex:a")
    index.find(["a"])
    assert index._automata == automata
    assert index._regex_set is regex_set

    add(index, "**.d.**", "regex:b")
    index.find(["a"])
    assert index._automata[0] is automata[0]
    assert index._automata[1] is not automata[1]
    assert index._regex_set is not regex_set


@pytest.mark.parametrize("pattern", ["a", "b", "a.*", "**.a.**", "regex:a"])
def test_nothing_can_be_added_to_a_compact_index(pattern: str) -> None:
    index = index_of("a", "regex:a")
    index.compact()

    with pytest.raises(InvalidState, match="compact"):
        add(index, pattern)

    assert index.find(["a"]) == ["a", "regex:a"]


def test_an_empty_index_finds_nothing() -> None:
    index = index_of()

    assert index.find(["a"]) == []
    index.compact()
    assert index.find(["a"]) == []
