"""Where batches are in their stream: some of them, remembered, so that the others are found in a few steps."""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

MOST = 4_096
"""Marks. In a log of a million batches, what lies between two of them is found in eight steps."""


class Mark(NamedTuple):
    """Of one batch: its place in the stream, its offsets, its time."""

    sequence: int
    first: int
    end: int
    at: float


class Marks:
    """Marks in the order of the stream, spread over all of it."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def add(self, mark: Mark) -> None:
        """Remember one more."""
        place = bisect_left(self._marks, mark.sequence, key=attrgetter("sequence"))
        if self._marks[place : place + 1] != [mark]:
            insort(self._marks, mark, key=attrgetter("sequence"))
        if len(self._marks) > MOST:
            # Evenly: to drop every other one would leave those that came first ever farther apart.
            stride = 2 * (self._marks[-1].sequence - self._marks[0].sequence) // MOST + 1
            self._marks = list({one.sequence // stride: one for one in self._marks}.values())

    def around(self, is_behind: Callable[[Mark], bool]) -> tuple[Mark | None, Mark | None]:
        """The last one before a place, and the first one behind it. All behind it are behind it."""
        place = bisect_left(self._marks, True, key=is_behind)
        before = self._marks[place - 1] if place else None
        return before, self._marks[place] if place < len(self._marks) else None

    def forget_before(self, sequence: int) -> None:
        """The batches up to this one are gone."""
        del self._marks[: bisect_left(self._marks, sequence, key=attrgetter("sequence"))]
