"""The automaton: matches all patterns with several `**` at once, one step per segment of the topic.

In a trie such patterns overlap without end: after `**` every node below stays alive, and a walk visits most of
them. Here each pattern is a row of states, all states of all patterns are the bits of one integer, and one step of
all of them is a shift, an `and` and an `or`, done by the processor some thousand bits in a microsecond.

    bit of state i of pattern p = i * patterns + p          (so a shift by `patterns` moves everything one state on)

State i means: the first i single segments of the pattern are matched. It stays alive on any segment if a `**`
follows there. Patterns are aligned at their ends, so that the last row is the set of patterns that fit.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from raydispatch.routing.pattern import Segment, SegmentKind, partial_matcher

LeafT = TypeVar("LeafT")


class Automaton(Generic[LeafT]):
    """Patterns, each with a leaf, compiled to bit masks."""

    def __init__(self, patterns: Sequence[tuple[Sequence[Segment], LeafT]]) -> None:
        self._leaves = [leaf for _, leaf in patterns]
        self._width = len(patterns)
        self._rows = max((_single_segments(pattern) for pattern, _ in patterns), default=0)
        self._start = 0
        self._stays = 0
        self._any = 0
        self._literals: dict[str, int] = {}
        self._partials: dict[str, int] = {}
        for column, (pattern, _) in enumerate(patterns):
            self._add(pattern, column)
        # A segment that some pattern names also goes wherever any segment goes.
        self._literals = {text: bits | self._any for text, bits in self._literals.items()}
        self._matchers: list[tuple[Callable[[str], object], int]] = [
            (partial_matcher(text), bits) for text, bits in self._partials.items()
        ]

    def find(self, topic: Sequence[str]) -> list[LeafT]:
        """The leaves of all patterns that fit a topic."""
        state, width, stays = self._start, self._width, self._stays
        for segment in topic:
            takes = self._literals.get(segment, self._any)
            for fits, bits in self._matchers:
                if fits(segment):
                    takes |= bits
            state = (state << width) & takes | state & stays
        return self._leaves_of(state >> self._rows * width)

    def _add(self, pattern: Sequence[Segment], column: int) -> None:
        row = self._rows - _single_segments(pattern)
        self._start |= self._bit(row, column)
        for kind, text in pattern:
            if kind is SegmentKind.REST:
                self._stays |= self._bit(row, column)
                continue
            row += 1
            bit = self._bit(row, column)
            if kind is SegmentKind.ANY:
                self._any |= bit
            else:
                masks = self._literals if kind is SegmentKind.LITERAL else self._partials
                masks[text] = masks.get(text, 0) | bit

    def _bit(self, row: int, column: int) -> int:
        return 1 << row * self._width + column

    def _leaves_of(self, accepted: int) -> list[LeafT]:
        # Searching the digits is faster than clearing bit by bit, each of which would copy the integer.
        digits = bin(accepted)[:1:-1]
        found = []
        column = digits.find("1")
        while column >= 0:
            found.append(self._leaves[column])
            column = digits.find("1", column + 1)
        return found


def _single_segments(pattern: Sequence[Segment]) -> int:
    return sum(segment.kind is not SegmentKind.REST for segment in pattern)
