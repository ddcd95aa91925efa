import pytest

from raydispatch.delivery.consumer import ACKED, REFUSED, Ending, Verdict, verdict_of
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.errors import ErrorCode

MEANINGS = {
    DispatchStatus.SUCCESS: "acked",
    DispatchStatus.SKIPPED: "acked",
    DispatchStatus.CIRCUIT_OPEN: "refused",
    DispatchStatus.REJECTED: "refused",
    DispatchStatus.DISPATCHER_ERROR: "failed",
    DispatchStatus.TIMEOUT: "failed",
    DispatchStatus.PUBLISH_FAILED: "failed",
    DispatchStatus.NO_DISPATCHER: "failed",
    DispatchStatus.ROUTED: "failed",
    DispatchStatus.INVALID_MESSAGE: "failed for good",
}


def meaning(verdict: Verdict) -> str:
    return f"{verdict.ending.value}{' for good' if verdict.is_final else ''}"


@pytest.mark.parametrize("status", list(DispatchStatus))
def test_every_status_means_something_for_the_message(status: DispatchStatus) -> None:
    assert meaning(verdict_of(Outcome("a", status))) == MEANINGS[status]


@pytest.mark.parametrize("code", [ErrorCode.HANDLER_RESULT, ErrorCode.HOP_LIMIT])
def test_what_would_end_the_same_way_is_not_tried_again(code: ErrorCode) -> None:
    status = DispatchStatus.PUBLISH_FAILED if code is ErrorCode.HOP_LIMIT else DispatchStatus.DISPATCHER_ERROR

    assert verdict_of(Outcome("a", status, error_code=code)).is_final


@pytest.mark.parametrize("code", [ErrorCode.HANDLER_EXCEPTION, ErrorCode.OUTBOX_FULL, ErrorCode.REPLICA_LOST, None])
def test_other_failures_are_tried_again(code: ErrorCode | None) -> None:
    verdict = verdict_of(Outcome("a", DispatchStatus.DISPATCHER_ERROR, error_code=code))

    assert (verdict.ending, verdict.is_final) == (Ending.FAILED, False)


def test_a_failure_carries_its_outcome_and_leaves_the_delay_to_the_rule() -> None:
    outcome = Outcome("a", DispatchStatus.TIMEOUT)

    verdict = verdict_of(outcome)

    assert (verdict.outcome, verdict.delay_seconds) == (outcome, None)


def test_what_was_not_tried_or_went_well_needs_no_outcome() -> None:
    assert verdict_of(Outcome("a", DispatchStatus.SUCCESS)) is ACKED
    assert verdict_of(Outcome("a", DispatchStatus.REJECTED)) is REFUSED
    assert (ACKED.outcome, REFUSED.outcome) == (None, None)


def test_a_repeat_of_a_success_is_one() -> None:
    assert verdict_of(Outcome("a", DispatchStatus.SUCCESS, repeated=True)) is ACKED
