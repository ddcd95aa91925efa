"""The trie: finds the patterns that fit a topic in time that does not depend on how many there are.

It holds the patterns with at most one `**`. What stands after that `**` is kept in reverse, in a trie of its own
below it: the end of a topic is known, so the tail is read once from there, and nothing is ever tried twice.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from raydispatch.routing.pattern import Segment, SegmentKind, partial_matcher

LeafT = TypeVar("LeafT")


class _Node(Generic[LeafT]):
    __slots__ = ("any", "leaf", "literals", "partials", "passing", "tails")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[LeafT]] = {}
        self.any: _Node[LeafT] | None = None
        self.partials: dict[str, tuple[Callable[[str], object], _Node[LeafT]]] | None = None
        self.tails: _Node[LeafT] | None = None
        """What may follow a `**` here: a trie of reversed tails."""
        self.leaf: LeafT | None = None
        """Found where the topic ends."""
        self.passing: LeafT | None = None
        """Found wherever reached: the end of a tail, where the `**` takes all that is left."""


class Trie(Generic[LeafT]):
    """Patterns of at most one `**` each, with a leaf for each distinct one."""

    def __init__(self) -> None:
        self._root: _Node[LeafT] = _Node()

    def leaf(self, pattern: Sequence[Segment], make: Callable[[], LeafT]) -> LeafT:
        """The leaf of a pattern, made if this is the first time."""
        rest = next((i for i, segment in enumerate(pattern) if segment.kind is SegmentKind.REST), len(pattern))
        node = _descend(self._root, pattern[:rest])
        if rest == len(pattern):
            node.leaf = node.leaf or make()
            return node.leaf
        node.tails = node.tails or _Node()
        node = _descend(node.tails, pattern[:rest:-1])
        node.passing = node.passing or make()
        return node.passing

    def find(self, topic: Sequence[str]) -> list[LeafT]:
        """The leaves of all patterns that fit a topic, in no particular order."""
        found: list[LeafT] = []
        _walk(self._root, topic, found)
        return found


def _walk(node: _Node[LeafT], topic: Sequence[str], found: list[LeafT]) -> None:
    """Go down every branch that fits. The straight way costs no more than the look-ups; branches wait on a stack."""
    end = len(topic)
    position = 0
    waiting: list[tuple[_Node[LeafT], int]] = []
    while True:
        if node.passing is not None:
            found.append(node.passing)
        if node.tails is not None:
            _walk(node.tails, topic[position:][::-1], found)
        following: _Node[LeafT] | None = None
        if position == end:
            if node.leaf is not None:
                found.append(node.leaf)
        else:
            segment = topic[position]
            position += 1
            following = node.any
            if node.literals and (child := node.literals.get(segment)) is not None:
                if following is not None:
                    waiting.append((following, position))
                following = child
            if node.partials is not None:
                waiting += [(child, position) for fits, child in node.partials.values() if fits(segment)]
        if following is not None:
            node = following
        elif waiting:
            node, position = waiting.pop()
        else:
            return


def _descend(node: _Node[LeafT], segments: Sequence[Segment]) -> _Node[LeafT]:
    for segment in segments:
        node = _child(node, segment)
    return node


def _child(node: _Node[LeafT], segment: Segment) -> _Node[LeafT]:
    if segment.kind is SegmentKind.LITERAL:
        if segment.text not in node.literals:
            node.literals[segment.text] = _Node()
        return node.literals[segment.text]
    if segment.kind is SegmentKind.ANY:
        node.any = node.any or _Node()
        return node.any
    node.partials = node.partials or {}
    if segment.text not in node.partials:
        node.partials[segment.text] = (partial_matcher(segment.text), _Node())
    return node.partials[segment.text][1]
