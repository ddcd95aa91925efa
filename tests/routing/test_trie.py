"""The trie finds what matching pattern by pattern finds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.routing.pattern import parse_pattern
from raydispatch.routing.trie import Trie

segments = st.sampled_from(["a", "b", "c", "*", "a*", "?b", "[ab]c", "[!a]"])
single_star_patterns = st.tuples(
    st.lists(segments, max_size=3), st.sampled_from([[], ["**"]]), st.lists(segments, max_size=3)
).map(lambda parts: ".".join(parts[0] + parts[1] + parts[2]))
topics = st.lists(st.sampled_from(["a", "b", "c", "ab", "ac", "bc"]), min_size=1, max_size=6)


def trie_of(*patterns: str) -> Trie[str]:
    trie: Trie[str] = Trie()
    for text in patterns:
        trie.leaf(parse_pattern(text).segments, lambda text=text: text)  # type: ignore[misc]
    return trie


@given(st.lists(single_star_patterns.filter(bool), max_size=12, unique=True), topics)
@settings(max_examples=300, deadline=None)
def test_the_trie_finds_each_pattern_that_fits_once(patterns: list[str], topic: list[str]) -> None:
    trie = trie_of(*patterns)

    found = trie.find(topic)

    assert sorted(found) == sorted(text for text in patterns if parse_pattern(text).matches(".".join(topic)))


def test_equal_patterns_share_a_leaf() -> None:
    trie: Trie[list[int]] = Trie()

    leaves = [trie.leaf(parse_pattern(text).segments, list) for text in ("a.*.**.b", "A.*.**.B", "a.*.**.c")]
    leaves[0].append(1)
    again = trie.leaf(parse_pattern("a.*.**.b").segments, lambda: [2])

    assert again is leaves[0]
    assert leaves[2] is not leaves[0]


def test_a_tail_may_not_take_what_the_head_has_taken() -> None:
    trie = trie_of("a.**.a")

    assert trie.find(["a"]) == []
    assert trie.find(["a", "a"]) == ["a.**.a"]


def test_an_empty_trie_finds_nothing() -> None:
    assert trie_of().find(["a"]) == []
