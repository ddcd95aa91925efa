"""The automaton finds what matching pattern by pattern finds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.routing.automaton import Automaton
from raydispatch.routing.pattern import parse_pattern

segments = st.sampled_from(["a", "b", "c", "*", "**", "**", "a*", "?b", "[ab]c", "[!a]"])
patterns_of_any_kind = st.lists(segments, min_size=1, max_size=6).map(".".join)
topics = st.lists(st.sampled_from(["a", "b", "c", "ab", "ac", "bc"]), min_size=1, max_size=7)


def automaton_of(*patterns: str) -> Automaton[str]:
    return Automaton([(parse_pattern(text).segments, text) for text in patterns])


@given(st.lists(patterns_of_any_kind, max_size=12, unique=True), topics)
@settings(max_examples=300, deadline=None)
def test_the_automaton_finds_each_pattern_that_fits_once(patterns: list[str], topic: list[str]) -> None:
    automaton = automaton_of(*patterns)

    found = automaton.find(topic)

    assert found == [text for text in patterns if parse_pattern(text).matches(".".join(topic))]


def test_patterns_of_different_lengths_do_not_touch_each_other() -> None:
    automaton = automaton_of("**.a.**", "**", "**.a.**.b.**.c.**", "**.b.**.a")

    assert automaton.find(["x"]) == ["**"]
    assert automaton.find(["b", "a"]) == ["**.a.**", "**", "**.b.**.a"]
    assert automaton.find(["a", "b", "c"]) == ["**.a.**", "**", "**.a.**.b.**.c.**"]


def test_more_patterns_than_a_machine_word_has_bits() -> None:
    patterns = [f"**.s{i}.**" for i in range(200)]
    automaton = automaton_of(*patterns)

    assert automaton.find(["s0", "s199", "s64"]) == ["**.s0.**", "**.s64.**", "**.s199.**"]


def test_an_automaton_without_patterns_finds_nothing() -> None:
    assert automaton_of().find(["a"]) == []
