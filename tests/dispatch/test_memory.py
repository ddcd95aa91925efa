from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch.dispatch.memory import OutcomeMemory
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply

SUCCESS = Outcome("billing", DispatchStatus.SUCCESS, "route", ("dev.invoice.events.v1",), 1, 2.5, reply=Reply(7))
KEPT = {DispatchStatus.SUCCESS, DispatchStatus.PUBLISH_FAILED}


def test_a_repeat_gets_the_stored_outcome_with_a_mark() -> None:
    memory = OutcomeMemory(10)
    message_id = uuid4()

    memory.keep(message_id, SUCCESS)

    assert memory.recall(message_id) == SUCCESS._replace(repeated=True)
    assert message_id in memory


def test_a_stranger_is_not_known() -> None:
    memory = OutcomeMemory(10)
    memory.keep(uuid4(), SUCCESS)

    assert memory.recall(uuid4()) is None
    assert uuid4() not in memory


@pytest.mark.parametrize("status", DispatchStatus)
def test_only_what_must_not_happen_twice_is_kept(status: DispatchStatus) -> None:
    memory = OutcomeMemory(10)
    message_id = uuid4()

    memory.keep(message_id, Outcome("billing", status))

    assert (message_id in memory) == (status in KEPT)


def test_a_failure_does_not_push_out_a_success() -> None:
    memory = OutcomeMemory(2)
    message_id = uuid4()
    memory.keep(message_id, SUCCESS)

    for _ in range(10):
        memory.keep(uuid4(), Outcome("billing", DispatchStatus.DISPATCHER_ERROR))

    assert message_id in memory


def test_the_later_of_two_outcomes_is_recalled() -> None:
    memory = OutcomeMemory(4)
    message_id = uuid4()
    memory.keep(message_id, SUCCESS)
    memory.keep(uuid4(), SUCCESS)
    memory.keep(uuid4(), SUCCESS)

    later = SUCCESS._replace(attempts=2)
    memory.keep(message_id, later)

    assert memory.recall(message_id) == later._replace(repeated=True)


@given(capacity=st.integers(2, 12), count=st.integers(0, 60))
def test_it_never_grows_beyond_its_capacity_and_keeps_at_least_the_newest_half(capacity: int, count: int) -> None:
    memory = OutcomeMemory(capacity)
    ids = [UUID(int=number) for number in range(1, count + 1)]

    for message_id in ids:
        memory.keep(message_id, SUCCESS)
        assert len(memory) <= capacity

    newest = ids[max(0, count - capacity // 2) :]
    assert all(message_id in memory for message_id in newest)
    assert len(memory) == sum(message_id in memory for message_id in ids)
