import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.dispatch.row_memory import Ids, RowMemory
from raydispatch.errors import ErrorCode

SUCCESS = Outcome("billing", DispatchStatus.SUCCESS, attempts=1)
UNSENT = Outcome("billing", DispatchStatus.PUBLISH_FAILED, attempts=1, error_code=ErrorCode.OUTBOX_FULL)
FAILED = Outcome("billing", DispatchStatus.DISPATCHER_ERROR, attempts=3, error_message="down")
KEPT = {DispatchStatus.SUCCESS, DispatchStatus.PUBLISH_FAILED}
KINDS = [SUCCESS, FAILED, UNSENT]


def ids_of(*numbers: int) -> Ids:
    """Ids that differ in their first half, and share the marks of their second half with every seventh other."""
    return np.array([(number * 0x9E3779B97F4A7C15 % 2**64, number % 7) for number in numbers], np.uint64).reshape(-1, 2)


def codes_of(*codes: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(codes, np.int32)


def keep(memory: RowMemory, *numbers: int, outcome: Outcome = SUCCESS) -> None:
    memory.keep(ids_of(*numbers), [outcome], codes_of(*[0] * len(numbers)))


def recalled(memory: RowMemory, *numbers: int) -> dict[int, Outcome]:
    """What is known of these, by number."""
    positions, outcomes = memory.recall(ids_of(*numbers))
    return {numbers[position]: outcome for position, outcome in zip(positions.tolist(), outcomes, strict=True)}


def test_a_repeat_gets_the_stored_outcome_with_a_mark() -> None:
    memory = RowMemory(10)

    keep(memory, 1, 2, 3)

    assert recalled(memory, 2) == {2: SUCCESS._replace(repeated=True)}


def test_the_known_ones_are_told_by_their_position_among_strangers() -> None:
    memory = RowMemory(10)
    keep(memory, 1, 2, 3)

    positions, outcomes = memory.recall(ids_of(9, 3, 8, 1))

    assert positions.tolist() == [1, 3]
    assert outcomes == [SUCCESS._replace(repeated=True)] * 2


def test_an_empty_memory_knows_nobody() -> None:
    positions, outcomes = RowMemory(10).recall(ids_of(1, 2, 3))

    assert (positions.tolist(), outcomes) == ([], [])


def test_a_stranger_with_the_same_mark_is_not_known() -> None:
    memory = RowMemory(10)
    keep(memory, 1)

    assert recalled(memory, 8) == {}


def test_a_stranger_with_the_same_first_half_is_not_known() -> None:
    memory = RowMemory(10)
    memory.keep(np.array([[5, 1]], np.uint64), [SUCCESS], codes_of(0))

    positions, _ = memory.recall(np.array([[5, 2]], np.uint64))

    assert positions.tolist() == []


@pytest.mark.parametrize("status", DispatchStatus)
def test_only_what_must_not_happen_twice_is_kept(status: DispatchStatus) -> None:
    memory = RowMemory(10)

    keep(memory, 1, outcome=Outcome("billing", status))

    assert (1 in recalled(memory, 1)) == (status in KEPT)


def test_each_row_has_the_outcome_that_its_code_says() -> None:
    memory = RowMemory(10)

    memory.keep(ids_of(1, 2, 3, 4), KINDS, codes_of(2, 0, 1, 0))

    assert {number: outcome.status for number, outcome in recalled(memory, 1, 2, 3, 4).items()} == {
        1: DispatchStatus.PUBLISH_FAILED,
        2: DispatchStatus.SUCCESS,
        4: DispatchStatus.SUCCESS,
    }
    assert len(memory) == 3


def test_failures_do_not_push_out_a_success() -> None:
    memory = RowMemory(2)
    keep(memory, 1)

    for number in range(2, 20):
        keep(memory, number, outcome=FAILED)

    assert 1 in recalled(memory, 1)


def test_the_later_of_two_outcomes_is_recalled() -> None:
    memory = RowMemory(4)
    keep(memory, 1, 2)
    keep(memory, 3)

    keep(memory, 1, outcome=UNSENT)

    assert recalled(memory, 1)[1].status is DispatchStatus.PUBLISH_FAILED


def test_the_oldest_go_first() -> None:
    memory = RowMemory(4)

    for number in range(1, 8):
        keep(memory, number)

    assert set(recalled(memory, *range(1, 8))) == {5, 6, 7}


@pytest.mark.parametrize("sizes", [[10], [3, 3]])
def test_it_never_grows_beyond_its_capacity_however_large_the_parts_are(sizes: list[int]) -> None:
    memory = RowMemory(4)
    sizes_of_it = []

    for part, size in enumerate(sizes):
        keep(memory, *range(100 * part + 1, 100 * part + 1 + size))
        sizes_of_it.append(len(memory))

    assert max(sizes_of_it) <= 4


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(2, 16),
    parts=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), unique_by=lambda row: row[0], max_size=6)
    ),
)
def test_it_agrees_with_a_dict_on_the_newest_and_never_knows_a_stranger(
    capacity: int, parts: list[list[tuple[int, int]]]
) -> None:
    memory = RowMemory(capacity)
    model: dict[int, Outcome] = {}
    kept: list[int] = []

    for part in parts:
        memory.keep(ids_of(*(number for number, _ in part)), KINDS, codes_of(*(code for _, code in part)))
        for number, code in part:
            if KINDS[code].status in KEPT:
                kept.append(number)
                model[number] = KINDS[code]._replace(repeated=True)

    found = recalled(memory, *range(1, 50))
    assert found.items() <= model.items()
    assert set(found) >= set(kept[-(capacity // 2) :])
    assert len(memory) >= len(found)
