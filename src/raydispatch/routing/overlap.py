"""What two patterns have in common: whether some topic fits both, and whether one takes all that the other takes.

Regular expressions are not compared: for them the answer is always "not that we know".
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple, TypeVar

from raydispatch.routing.pattern import Pattern, PatternKind, Segment, SegmentKind, class_ranges
from raydispatch.routing.route import DispatchRoute

TokenT = TypeVar("TokenT")


def overlaps(one: Pattern, other: Pattern) -> bool:
    """Whether some topic fits both."""
    if PatternKind.REGEX in (one.kind, other.kind):
        return False
    return _meet(one.segments, other.segments, _is_rest, _segments_meet)


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that fits `narrow` certainly fits `wide`.

    The answer is never wrongly True; it can be wrongly False, where only a case distinction would show it.
    """
    if PatternKind.REGEX in (wide.kind, narrow.kind):
        return False
    return _cover(wide.segments, narrow.segments)


class OverlapSearch:
    """Finds the pairs of routes whose patterns overlap, without comparing each with each.

    Routes are sorted into groups, segment by segment, and only groups that can meet are followed. What this does not
    separate (after a `**`, or on partial segments) is compared pair by pair. `complete` tells afterwards whether the
    limit of work was enough to see everything.
    """

    def __init__(self, routes: Sequence[DispatchRoute], most_work: int = 2_000_000) -> None:
        self._routes = [route for route in routes if route.pattern.kind is not PatternKind.REGEX]
        self._work_left = most_work
        self.complete = True

    def pairs(self) -> Iterator[tuple[DispatchRoute, DispatchRoute]]:
        """Each overlapping pair once."""
        return self._within(self._routes, 0)

    def _within(self, routes: Sequence[DispatchRoute], depth: int) -> Iterator[tuple[DispatchRoute, DispatchRoute]]:
        if len(routes) < 2 or not self._may_go_on(len(routes)):
            return
        groups = _group(routes, depth)
        yield from combinations(groups.ended, 2)
        yield from self._compare(combinations(groups.hard, 2))
        yield from self._compare(product(groups.hard, groups.easy()))
        yield from self._within(groups.any, depth + 1)
        for same in groups.literals.values():
            yield from self._within(same, depth + 1)
            yield from self._between(groups.any, same, depth + 1)

    def _between(
        self, left: Sequence[DispatchRoute], right: Sequence[DispatchRoute], depth: int
    ) -> Iterator[tuple[DispatchRoute, DispatchRoute]]:
        if not left or not right or not self._may_go_on(len(left) + len(right)):
            return
        ours, theirs = _group(left, depth), _group(right, depth)
        yield from product(ours.ended, theirs.ended)
        yield from self._compare(product(ours.hard, right))
        yield from self._compare(product(ours.easy(), theirs.hard))
        yield from self._between(ours.any, theirs.any, depth + 1)
        for text, same in ours.literals.items():
            yield from self._between(same, theirs.literals.get(text, []), depth + 1)
            yield from self._between(same, theirs.any, depth + 1)
        for same in theirs.literals.values():
            yield from self._between(ours.any, same, depth + 1)

    def _compare(
        self, candidates: Iterator[tuple[DispatchRoute, DispatchRoute]]
    ) -> Iterator[tuple[DispatchRoute, DispatchRoute]]:
        for one, other in candidates:
            if not self._may_go_on(1):
                return
            if overlaps(one.pattern, other.pattern):
                yield one, other

    def _may_go_on(self, work: int) -> bool:
        self._work_left -= work
        self.complete = self._work_left >= 0
        return self.complete


class _Groups(NamedTuple):
    ended: list[DispatchRoute]
    any: list[DispatchRoute]
    literals: dict[str, list[DispatchRoute]]
    hard: list[DispatchRoute]

    def easy(self) -> list[DispatchRoute]:
        return [*self.ended, *self.any, *(route for same in self.literals.values() for route in same)]


def _group(routes: Sequence[DispatchRoute], depth: int) -> _Groups:
    groups = _Groups([], [], {}, [])
    for route in routes:
        segments = route.pattern.segments
        if depth == len(segments):
            groups.ended.append(route)
        elif segments[depth].kind is SegmentKind.LITERAL:
            groups.literals.setdefault(segments[depth].text, []).append(route)
        else:
            (groups.any if segments[depth].kind is SegmentKind.ANY else groups.hard).append(route)
    return groups


def _meet(
    one: Sequence[TokenT],
    other: Sequence[TokenT],
    is_star: Callable[[TokenT], bool],
    tokens_meet: Callable[[TokenT, TokenT], bool],
) -> bool:
    """Whether two sequences with stars (zero or more of anything) have a sequence in common."""
    # Row by row: reachable[j] says whether the first i tokens of one and j of the other can stand for the same.
    reachable = [True]
    for token in other:
        reachable.append(reachable[-1] and is_star(token))
    for mine in one:
        row = [reachable[0] and is_star(mine)]
        for j, theirs in enumerate(other):
            if is_star(mine) or is_star(theirs):
                row.append(reachable[j + 1] or row[j])
            else:
                row.append(reachable[j] and tokens_meet(mine, theirs))
        reachable = row
    return reachable[-1]


def _cover(wide: Sequence[Segment], narrow: Sequence[Segment]) -> bool:
    """The same table for inclusion; a `**` of the narrow one can only be taken by a `**` of the wide one."""
    covered = [True] + [False] * len(narrow)
    for mine in wide:
        row = [covered[0] and _is_rest(mine)]
        for j, theirs in enumerate(narrow):
            if _is_rest(mine):
                row.append(covered[j + 1] or row[j])
            else:
                row.append(covered[j] and _segment_covers(mine, theirs))
        covered = row
    return covered[-1]


def _is_rest(segment: Segment) -> bool:
    return segment.kind is SegmentKind.REST


def _segments_meet(one: Segment, other: Segment) -> bool:
    if SegmentKind.ANY in (one.kind, other.kind):
        return True
    if one.kind is SegmentKind.LITERAL:
        return other.accepts(one.text)
    if other.kind is SegmentKind.LITERAL:
        return one.accepts(other.text)
    return _meet(_characters(one.text), _characters(other.text), _is_run, _characters_meet)


def _segment_covers(wide: Segment, narrow: Segment) -> bool:
    if _is_rest(narrow):
        return False
    if wide.kind is SegmentKind.ANY or wide == narrow:
        return True
    return narrow.kind is SegmentKind.LITERAL and wide.accepts(narrow.text)


class _Character(NamedTuple):
    """One character of a partial segment: a literal, a class, `?` (no ranges, negated) or `*` (a run)."""

    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False
    run: bool = False


@lru_cache(maxsize=4_096)
def _characters(text: str) -> tuple[_Character, ...]:
    characters = []
    i = 0
    while i < len(text):
        if text[i] == "[":
            end = text.index("]", i + 1)
            members = text[i + 1 : end]
            characters.append(_Character(tuple(class_ranges(members.removeprefix("!"))), members.startswith("!")))
            i = end
        elif text[i] in "*?":
            characters.append(_Character(negated=True, run=text[i] == "*"))
        else:
            characters.append(_Character(((text[i], text[i]),)))
        i += 1
    return tuple(characters)


def _is_run(character: _Character) -> bool:
    return character.run


def _characters_meet(one: _Character, other: _Character) -> bool:
    if one.negated and other.negated:
        return True
    if one.negated:
        one, other = other, one
    if not other.negated:
        return any(a <= d and c <= b for a, b in one.ranges for c, d in other.ranges)
    # Some character of the one must be outside of all that the other excludes. Looking at one more than it excludes
    # is enough.
    excluded = sum(ord(d) - ord(c) + 1 for c, d in other.ranges)
    return any(
        not any(c <= chr(code) <= d for c, d in other.ranges)
        for a, b in one.ranges
        for code in range(ord(a), min(ord(b), ord(a) + excluded) + 1)
    )
