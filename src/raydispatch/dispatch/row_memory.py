"""What a dispatcher remembers of rows it has handled: ids as numbers in arrays, never an object for each."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raydispatch.dispatch.outcome import DispatchStatus, Outcome

Ids: TypeAlias = npt.NDArray[np.uint64]
"""Message ids, as rows of two numbers."""

_KEPT = (DispatchStatus.SUCCESS, DispatchStatus.PUBLISH_FAILED)
_MARK_BITS = 24


class RowMemory:
    """Ids of rows that must not be handled again, at most `capacity` of them, with what became of them.

    Most rows are new. A table of marks says that of nearly all of them at once, at a few nanoseconds each; only the
    rest is looked up. Two generations, as of single messages: the old one goes as a whole.
    """

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young = _Generation()
        self._old = _Generation()

    def keep(self, ids: Ids, kinds: Sequence[Outcome], codes: npt.NDArray[np.int32]) -> None:
        """Remember those that ended in a way that must not happen again; the codes say in which."""
        kept = np.array([kind.status in _KEPT for kind in kinds])[codes]
        if not kept.all():
            ids, codes = ids[kept], codes[kept]
        if not len(ids):
            return
        stored = [kind._replace(repeated=True) for kind in kinds]
        start = max(0, len(ids) - 2 * self._half)  # Of a part larger than all that fits, the last ones.
        while start < len(ids):
            if len(self._young) >= self._half:
                self._old, self._young = self._young, _Generation()
            end = start + self._half - len(self._young)
            self._young.add(ids[start:end], stored, codes[start:end])
            start = end

    def recall(self, ids: Ids) -> tuple[npt.NDArray[np.int64], list[Outcome]]:
        """Which of these are known, by position, and their stored outcomes."""
        found: dict[int, Outcome] = {}
        for generation in (self._old, self._young):
            found |= generation.find(ids)
        return np.array(sorted(found), np.int64), [found[position] for position in sorted(found)]

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class Marks:
    """Says of ids that they are new, or that they may be known: wrong for one of 300 with half a million in it."""

    def __init__(self) -> None:
        self._table: npt.NDArray[np.bool_] | None = None

    def add(self, ids: Ids) -> None:
        """These are known."""
        if self._table is None:
            self._table = np.zeros(1 << _MARK_BITS, bool)
        for mark in _marks_of(ids):
            self._table[mark] = True

    def maybe(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The positions of those that may be known."""
        if self._table is None:
            return np.zeros(0, np.int64)
        one, other = _marks_of(ids)
        return np.flatnonzero(self._table[one] & self._table[other])


class _Generation:
    def __init__(self) -> None:
        self._marks = Marks()
        self._blocks: list[tuple[Ids, list[Outcome], npt.NDArray[np.int32]]] = []
        self._count = 0

    def add(self, ids: Ids, kinds: list[Outcome], codes: npt.NDArray[np.int32]) -> None:
        self._marks.add(ids)
        order = np.argsort(ids[:, 0])
        self._blocks.append((ids[order], kinds, codes[order]))
        self._count += len(ids)

    def find(self, ids: Ids) -> dict[int, Outcome]:
        maybe = self._marks.maybe(ids)
        found: dict[int, Outcome] = {}
        for block, kinds, codes in self._blocks if len(maybe) else ():
            wanted = ids[maybe]
            # The first half of an id decides: that two of so many share it is less likely than a broken disk.
            at = np.minimum(np.searchsorted(block[:, 0], wanted[:, 0]), len(block) - 1)
            hits = (block[at] == wanted).all(axis=1)
            found |= {
                row: kinds[code] for row, code in zip(maybe[hits].tolist(), codes[at[hits]].tolist(), strict=True)
            }
        return found

    def __len__(self) -> int:
        return self._count


def _marks_of(ids: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    bits = ids[:, 1]
    mask = np.uint64((1 << _MARK_BITS) - 1)
    return (bits & mask).astype(np.int64), (bits >> np.uint64(_MARK_BITS) & mask).astype(np.int64)
