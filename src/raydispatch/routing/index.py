"""The index: finds the leaves of all patterns that fit a topic, each kind of pattern by what suits it best.

Exact topics go by hash, patterns with at most one `**` by trie, those with more by automaton, `regex:` by RE2.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from raydispatch.errors import InvalidState
from raydispatch.routing.automaton import Automaton
from raydispatch.routing.pattern import Pattern, PatternKind, Segment, SegmentKind, regex_set
from raydispatch.routing.trie import Trie

LeafT = TypeVar("LeafT")

# Wider automata cost more memory for each literal they know; narrower ones more steps. A kilobit row is cheap at both.
_AUTOMATON_WIDTH = 1_024


class PatternIndex(Generic[LeafT]):
    """Patterns, each with a leaf. They may be added between searches, by one thread at a time, until `compact()`.

    Example: `index.leaf(parse_pattern("dev.**"), list).append(7)`; then `index.find(["dev", "a"]) == [[7]]`.
    """

    def __init__(self) -> None:
        self._exact: dict[str, LeafT] = {}
        self._trie: Trie[LeafT] = Trie()
        self._wide: dict[str, tuple[Sequence[Segment], LeafT]] = {}
        self._automata: list[Automaton[LeafT]] = []
        self._regexes: dict[str, LeafT] = {}
        self._regex_leaves: list[LeafT] = []
        self._regex_set: Any = None
        self._is_compact = False

    def leaf(self, pattern: Pattern, make: Callable[[], LeafT]) -> LeafT:
        """The leaf of a pattern, made if this is the first time."""
        if self._is_compact:
            raise InvalidState("The index is compact: no pattern can be added to it any more.")
        if pattern.kind is PatternKind.REGEX:
            return self._regex_leaf(pattern.text, make)
        rests = sum(segment.kind is SegmentKind.REST for segment in pattern.segments)
        if pattern.kind is PatternKind.GLOB and rests <= 1:
            return self._trie.leaf(pattern.segments, make)
        folded = ".".join(segment.text for segment in pattern.segments)
        return self._wide_leaf(folded, pattern.segments, make) if rests else self._exact_leaf(folded, make)

    def find(self, segments: list[str]) -> list[LeafT]:
        """The leaves of all patterns that fit a topic, given as its folded segments; in no particular order."""
        leaves = self._trie.find(segments)
        if self._exact:
            exact = self._exact.get(".".join(segments))
            if exact is not None:
                leaves.append(exact)
        # Whether something waits to be compiled is asked only where there is such a pattern at all: most have none.
        if self._wide:
            self._compile_automata()
            for automaton in self._automata:
                leaves += automaton.find(segments)
        if self._regexes:
            self._compile_regexes()
            # Where nothing fits, RE2 gives None.
            leaves += [self._regex_leaves[i] for i in self._regex_set.Match(".".join(segments)) or ()]
        return leaves

    def compact(self) -> None:
        """Make searching as fast as it gets, and safe from many threads; no pattern can be added afterwards."""
        self._is_compact = True
        self._trie.compact()
        self._compile_automata()
        self._compile_regexes()

    def _exact_leaf(self, folded: str, make: Callable[[], LeafT]) -> LeafT:
        leaf = self._exact.get(folded)
        if leaf is None:
            leaf = self._exact[folded] = make()
        return leaf

    def _wide_leaf(self, folded: str, segments: Sequence[Segment], make: Callable[[], LeafT]) -> LeafT:
        known = self._wide.get(folded)
        if known is None:
            # Only the last block can have room; the full ones before it stay as they are.
            del self._automata[len(self._wide) // _AUTOMATON_WIDTH :]
            known = self._wide[folded] = segments, make()
        return known[1]

    def _regex_leaf(self, text: str, make: Callable[[], LeafT]) -> LeafT:
        leaf = self._regexes.get(text)
        if leaf is None:
            self._regex_set = None
            leaf = self._regexes[text] = make()
            self._regex_leaves.append(leaf)
        return leaf

    def _compile_automata(self) -> None:
        while (start := len(self._automata) * _AUTOMATON_WIDTH) < len(self._wide):
            self._automata.append(Automaton(list(islice(self._wide.values(), start, start + _AUTOMATON_WIDTH))))

    def _compile_regexes(self) -> None:
        if self._regex_set is None and self._regexes:
            self._regex_set = regex_set(list(self._regexes))
