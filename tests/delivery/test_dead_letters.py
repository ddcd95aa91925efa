from datetime import UTC, datetime

from raydispatch.delivery.dead_letters import FINAL_FAILURES, DeadLetter, DeadLetters
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.messages.envelope import Envelope

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def make_letter(dispatcher_id: str = "a", error_type: str | None = "OSError") -> DeadLetter:
    outcome = Outcome(dispatcher_id, DispatchStatus.DISPATCHER_ERROR, error_type=error_type)
    return DeadLetter("a.events", Envelope("hello"), outcome, NOON, NOON, "v1")


def test_the_oldest_goes_when_there_is_no_room() -> None:
    letters = DeadLetters(2)

    for name in "abc":
        letters.add(make_letter(name))

    assert [letter.outcome.dispatcher_id for letter in letters.list()] == ["b", "c"]
    assert (len(letters), letters.forgotten) == (2, 1)


def test_a_capacity_of_nothing_keeps_nothing() -> None:
    letters = DeadLetters(0)

    letters.add(make_letter())

    assert (len(letters), letters.forgotten) == (0, 1)


def test_letters_are_found_by_dispatcher_and_by_error() -> None:
    letters = DeadLetters(10)
    for dispatcher_id, error_type in [("a", "OSError"), ("b", "OSError"), ("a", "KeyError")]:
        letters.add(make_letter(dispatcher_id, error_type))

    assert len(letters.list()) == 3
    assert len(letters.list(dispatcher_id="a")) == 2
    assert len(letters.list(error_type="OSError")) == 2
    assert len(letters.list(dispatcher_id="a", error_type="KeyError")) == 1
    assert letters.list(dispatcher_id="nobody") == []


def test_a_purge_lets_all_go_and_counts_them() -> None:
    letters = DeadLetters(10)
    letters.add(make_letter())

    assert letters.purge() == 1
    assert letters.purge() == len(letters) == 0


def test_a_refusal_by_a_breaker_makes_no_dead_letter() -> None:
    assert DispatchStatus.CIRCUIT_OPEN not in FINAL_FAILURES
