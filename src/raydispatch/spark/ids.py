"""Message ids of rows: two hashes that Spark has made, the occurrence among equal rows, and how they are written."""

from binascii import hexlify

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raydispatch.dispatch.row_memory import Ids, Marks

_PARTS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
"""Of the 32 characters of a UUID, those between its dashes."""
# Odd numbers with bits all over: the golden ratio, and one of the primes of xxHash.
_SPREAD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)

MOST_BLOCKS = 64
"""Of ids that were seen, each to be searched for the few that may be among them."""


class Occurrences:
    """Tells equal rows of a partition apart: the second one gets another id, and the same in every run.

    Rows may come in another order when a task runs again, but as often; so their number decides, not their position.
    """

    def __init__(self) -> None:
        self._marks = Marks()
        self._blocks: list[npt.NDArray[np.uint64]] = []
        self._counts: dict[int, int] = {}

    def apart(self, ids: Ids) -> Ids:
        """The ids, with the occurrence mixed in where it is not the first."""
        if not len(ids):
            return ids
        first = np.ascontiguousarray(ids[:, 0])
        ordered = np.sort(first)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        # The marks say of nearly all that they are new; only the rest is looked for.
        again = self._seen(np.sort(first[self._marks.maybe(ids)]))
        self._marks.add(ids)
        if not len(repeated) and not len(again):
            self._remember(ordered)
            return ids
        # Only those that come more than once are looked at one by one.
        suspects = np.flatnonzero(np.isin(first, np.concatenate([repeated, again])))
        numbers = np.zeros(len(ids), np.uint64)
        known = dict.fromkeys(again.tolist(), 1)
        for row in suspects.tolist():
            number = int(first[row])
            numbers[row] = count = self._counts.get(number, known.get(number, 0))
            self._counts[number] = int(count) + 1
        self._remember(ordered)
        return ids ^ (numbers[:, None] * _SPREAD)

    def _seen(self, ordered: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Those of earlier batches."""
        found = np.zeros(len(ordered), bool)
        for block in self._blocks if len(ordered) else ():
            found |= block[np.minimum(np.searchsorted(block, ordered), len(block) - 1)] == ordered
        return ordered[found]

    def _remember(self, ordered: npt.NDArray[np.uint64]) -> None:
        self._blocks.append(ordered)
        if len(self._blocks) > MOST_BLOCKS:
            self._blocks = [np.sort(np.concatenate(self._blocks))]


def ids_of(first: pa.Array, second: pa.Array) -> Ids:
    """Ids from two columns of 64-bit hashes."""
    return np.stack([column.to_numpy(zero_copy_only=False).view(np.uint64) for column in (first, second)], axis=1)


def binary_of(ids: Ids) -> pa.Array:
    """Ids as a column of 16 bytes."""
    buffer = pa.py_buffer(np.ascontiguousarray(ids))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(ids), [None, buffer])


def text_of(identities: pa.Array) -> pa.Array:
    """A column of 16 bytes, written as UUIDs are."""
    count = len(identities)
    numbers = np.frombuffer(identities.buffers()[1], np.uint8, 16 * count, 16 * identities.offset)
    digits = np.frombuffer(hexlify(numbers.data), np.uint8).reshape(count, 32)
    text = np.full((count, 36), ord("-"), np.uint8)
    for dashes, (start, end) in enumerate(_PARTS):
        text[:, start + dashes : end + dashes] = digits[:, start:end]
    offsets = np.arange(0, 36 * (count + 1), 36, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def parsed(texts: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """A column of UUIDs in text as 16 bytes, and which of them are none. A null stays a null."""
    from uuid import UUID

    found: list[bytes | None] = []
    wrong = np.zeros(len(texts), bool)
    for row, text in enumerate(texts.to_pylist()):
        try:
            found.append(None if text is None else UUID(text).bytes)
        except ValueError:
            wrong[row] = True
            found.append(None)
    return pa.array(found, pa.binary(16)), wrong
