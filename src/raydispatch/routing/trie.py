"""The trie: finds the patterns that fit a topic in time that does not depend on how many there are.

It holds the patterns with at most one `**`. What stands after that `**` is kept in reverse, in a trie of its own
below it: the end of a topic is known, so the tail is read once from there, and nothing is ever tried twice.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from raydispatch.routing.pattern import Segment, SegmentKind, partial_matcher

LeafT = TypeVar("LeafT")
Chain: TypeAlias = tuple[str | None, ...]


class _Node(Generic[LeafT]):
    __slots__ = ("any", "chain", "leaf", "literals", "partials", "passing", "tails")

    def __init__(self) -> None:
        # None where there is nothing: an empty dict would be one more place in memory to look at, and on a large table
        # those are what takes the time.
        self.literals: dict[str, _Node[LeafT]] | None = None
        self.any: _Node[LeafT] | None = None
        self.partials: dict[str, tuple[Callable[[str], object], _Node[LeafT]]] | None = None
        self.tails: _Node[LeafT] | None = None
        """What may follow a `**` here: a trie of reversed tails."""
        self.chain: Chain | None = None
        """The rest of the one pattern that goes on from here, where it is the only one; None in it is a `*`."""
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
            node.leaf = make() if node.leaf is None else node.leaf
            return node.leaf
        node.tails = node.tails or _Node()
        node = _descend(node.tails, pattern[:rest:-1])
        node.passing = make() if node.passing is None else node.passing
        return node.passing

    def compact(self) -> None:
        """Turn every branch that only one pattern takes into a single node; no leaf can be added afterwards.

        In a large table nearly every step to another node is a wait for memory. Equal chains are kept once, so that
        the steps along them are not.
        """
        _compact(self._root, {})

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
        if node.chain is not None:
            if len(node.chain) == end - position and _fits(node.chain, topic, position):
                found.append(node.leaf)  # type: ignore[arg-type]  # A chain ends in a leaf.
        elif position == end:
            if node.leaf is not None:
                found.append(node.leaf)
        else:
            segment = topic[position]
            position += 1
            following = node.any
            if node.literals is not None and (child := node.literals.get(segment)) is not None:
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


def _fits(chain: Chain, topic: Sequence[str], position: int) -> bool:
    for expected in chain:
        if expected is not None and expected != topic[position]:
            return False
        position += 1
    return True


def _compact(node: _Node[LeafT], known: dict[Chain, Chain]) -> None:
    children = [*(node.literals or {}).items(), *([(None, node.any)] if node.any else ())]
    for _, child in children:
        _compact(child, known)
    for _, child in (node.partials or {}).values():
        _compact(child, known)
    if node.tails is not None:
        _compact(node.tails, known)
    if len(children) != 1 or node.partials or node.tails or node.passing is not None or node.leaf is not None:
        return
    segment, child = children[0]
    is_leaf = child.leaf is not None and not (child.literals or child.any or child.partials)
    if child.passing is None and child.tails is None and (child.chain is not None or is_leaf):
        chain = (segment, *(child.chain or ()))
        node.chain, node.leaf = known.setdefault(chain, chain), child.leaf
        node.literals = node.any = None


def _descend(node: _Node[LeafT], segments: Sequence[Segment]) -> _Node[LeafT]:
    for segment in segments:
        node = _child(node, segment)
    return node


def _child(node: _Node[LeafT], segment: Segment) -> _Node[LeafT]:
    if segment.kind is SegmentKind.LITERAL:
        if node.literals is None:
            node.literals = {}
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
