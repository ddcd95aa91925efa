from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from uuid import UUID, uuid4

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.dispatch.row_memory import Ids
from raydispatch.spark.ids import MOST_BLOCKS, Occurrences, binary_of, ids_of, parsed, text_of


def ids(*numbers: int) -> Ids:
    """Rows by number: equal numbers are equal rows."""
    first = np.array(numbers, np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return np.stack([first, ~first], axis=1)


def listed(batches: Iterable[Ids]) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for batch in batches for first, second in batch]


def apart(*batches: list[int]) -> list[tuple[int, int]]:
    """The ids of the rows of one partition, which come in these batches."""
    occurrences = Occurrences()
    return listed(occurrences.apart(ids(*batch)) for batch in batches)


@st.composite
def ways_of_one_partition(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """The same rows twice, in some order and some batches each."""
    rows = draw(st.lists(st.integers(0, 12), max_size=60))
    return draw(batches_of(rows)), draw(batches_of(draw(st.permutations(rows))))


@st.composite
def batches_of(draw: st.DrawFn, rows: list[int]) -> list[list[int]]:
    borders = sorted(draw(st.sets(st.integers(1, max(1, len(rows) - 1)), max_size=3 * MOST_BLOCKS)))
    edges = [0, *borders, len(rows)]
    return [rows[start:end] for start, end in pairwise(edges) if start < end]


# Occurrences


def test_rows_that_differ_keep_their_ids() -> None:
    assert apart([1, 2], [3]) == listed([ids(1, 2, 3)])


def test_equal_rows_get_different_ids_within_a_batch_and_across_batches() -> None:
    found = apart([7, 7, 1], [7], [2, 7])

    assert len(set(found)) == 6
    assert found[0] == listed([ids(7)])[0]


@given(ways_of_one_partition())
@settings(deadline=None)
def test_the_same_rows_have_the_same_ids_in_any_order_and_any_batches(
    ways: tuple[list[list[int]], list[list[int]]],
) -> None:
    once, again = (apart(*batches) for batches in ways)

    assert Counter(once) == Counter(again)
    assert len(set(once)) == len(once)


def test_a_row_is_known_again_after_more_batches_than_are_searched_one_by_one() -> None:
    batches = [[number] for number in range(1, 3 * MOST_BLOCKS)]

    found = apart(*batches, [1], [1])

    assert len(set(found)) == len(found)


def test_an_empty_batch_changes_nothing() -> None:
    assert apart([], [1, 1]) == apart([1, 1])


# How they are written


@given(st.lists(st.uuids(), min_size=1, max_size=20))
@settings(deadline=None)
def test_ids_are_written_as_uuids_are(identities: list[UUID]) -> None:
    halves = np.frombuffer(b"".join(identity.bytes for identity in identities), np.int64).reshape(-1, 2)

    binary = binary_of(ids_of(pa.array(halves[:, 0]), pa.array(halves[:, 1])))

    assert binary.to_pylist() == [identity.bytes for identity in identities]
    assert text_of(binary).to_pylist() == [str(identity) for identity in identities]


def test_a_slice_of_ids_is_written_as_that_slice() -> None:
    identities = [uuid4() for _ in range(5)]
    binary = pa.array([identity.bytes for identity in identities], pa.binary(16))

    assert text_of(binary.slice(2, 2)).to_pylist() == [str(identity) for identity in identities[2:4]]


# Reading what others wrote


def test_uuids_are_read_and_what_is_none_is_marked() -> None:
    identity = uuid4()

    found, wrong = parsed(pa.array([str(identity), None, "order 7", identity.hex.upper(), ""]))

    assert found.to_pylist() == [identity.bytes, None, None, identity.bytes, None]
    assert wrong.tolist() == [False, False, True, False, True]


@given(st.lists(st.none() | st.uuids(), max_size=10))
@settings(deadline=None)
def test_what_was_written_is_read_again(identities: list[UUID | None]) -> None:
    found, wrong = parsed(pa.array([identity and str(identity) for identity in identities], pa.string()))

    assert found.to_pylist() == [identity and identity.bytes for identity in identities]
    assert not wrong.any()
