import pytest

from raydispatch.dispatch.outcome import DispatchStatus, Outcome, combined_error, worst_status
from raydispatch.errors import ErrorCode

S = DispatchStatus


def failed(dispatcher_id: str, status: DispatchStatus, code: ErrorCode) -> Outcome:
    return Outcome(dispatcher_id, status, error_code=code, error_message=f"{dispatcher_id} is down")


@pytest.mark.parametrize(("old", "status"), [("no_handler", S.NO_DISPATCHER), ("handler_error", S.DISPATCHER_ERROR)])
def test_older_names_of_a_status_are_understood(old: str, status: DispatchStatus) -> None:
    assert DispatchStatus(old) is status


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        DispatchStatus("nonsense")


def test_the_four_questions_have_the_promised_answers() -> None:
    assert [s for s in S if not s.is_terminal()] == [S.ROUTED]
    assert [s for s in S if s.is_successful()] == [S.SUCCESS]
    assert {s for s in S if not s.is_error()} == {S.SUCCESS, S.ROUTED, S.SKIPPED}
    assert {s for s in S if s.requires_retry()} == {S.TIMEOUT, S.PUBLISH_FAILED, S.CIRCUIT_OPEN, S.REJECTED}


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        ([S.SUCCESS, S.SUCCESS], S.SUCCESS),
        ([S.SUCCESS, S.CIRCUIT_OPEN], S.CIRCUIT_OPEN),
        ([S.CIRCUIT_OPEN, S.TIMEOUT, S.SUCCESS], S.TIMEOUT),
        ([S.TIMEOUT, S.DISPATCHER_ERROR], S.DISPATCHER_ERROR),
        ([S.SKIPPED, S.SUCCESS], S.SKIPPED),
    ],
)
def test_the_worst_status_stands_for_all(statuses: list[DispatchStatus], worst: DispatchStatus) -> None:
    assert worst_status([Outcome("a", status) for status in statuses]) is worst


@pytest.mark.parametrize("status", list(DispatchStatus))
def test_every_status_has_a_rank(status: DispatchStatus) -> None:
    assert worst_status([Outcome("a", status)]) is status


def test_the_code_is_that_of_the_worst_and_every_error_is_told() -> None:
    outcomes = [
        failed("a", S.CIRCUIT_OPEN, ErrorCode.CIRCUIT_OPEN),
        Outcome("b", S.SUCCESS),
        failed("c", S.TIMEOUT, ErrorCode.TIME_LIMIT),
    ]

    assert combined_error(outcomes, S.TIMEOUT) == (ErrorCode.TIME_LIMIT, "a: a is down; c: c is down")


def test_without_errors_there_is_nothing_to_tell() -> None:
    assert combined_error([Outcome("a", S.SUCCESS)], S.SUCCESS) == (None, None)
