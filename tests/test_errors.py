import pickle
from uuid import UUID

import pytest

from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.errors import (
    ChannelClosed,
    CircuitOpen,
    CorrelationError,
    DispatchError,
    DuplicateRegistration,
    DuplicateReply,
    EndpointLost,
    ErrorClass,
    ErrorCode,
    InvalidParameter,
    InvalidPattern,
    InvalidState,
    InvalidTable,
    LateReply,
    MissingExtra,
    NotRegistered,
    RequestFailed,
    RequestTimeout,
    UnknownReply,
)

ASKED = UUID(int=7)
RESULT = DispatchResult(
    UUID(int=1), DispatchStatus.TIMEOUT, "a.intents", error_message="a: too slow", error_code=ErrorCode.TIME_LIMIT
)

ERRORS = [
    InvalidParameter("a sentence"),
    InvalidState("a sentence"),
    DuplicateRegistration("route", "orders"),
    NotRegistered("dispatcher", "orders"),
    InvalidPattern("a..b", 2, "an empty segment"),
    InvalidTable(["one", "two"], ErrorCode.ITEM_NOT_REGISTERED),
    CircuitOpen("a sentence"),
    MissingExtra("ray", "ray"),
    EndpointLost("a sentence"),
    RequestFailed(ASKED, RESULT),
    *(kind(ASKED) for kind in (RequestTimeout, LateReply, UnknownReply, DuplicateReply, ChannelClosed)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_the_wire(error: DispatchError) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert (str(again), again.error_code) == (str(error), error.error_code)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidParameter("x"), ErrorCode.INVALID_PARAMETER),
        (InvalidState("x"), ErrorCode.INVALID_STATE),
        (DuplicateRegistration("route", "x"), ErrorCode.DUPLICATE_REGISTRATION),
        (NotRegistered("route", "x"), ErrorCode.ITEM_NOT_REGISTERED),
        (CircuitOpen("x"), ErrorCode.CIRCUIT_OPEN),
        (EndpointLost(), ErrorCode.REPLICA_LOST),
        (RequestTimeout(ASKED), ErrorCode.NO_REPLY),
        (LateReply(ASKED), ErrorCode.LATE_REPLY),
        (UnknownReply(ASKED), ErrorCode.UNKNOWN_REPLY),
        (DuplicateReply(ASKED), ErrorCode.DUPLICATE_REPLY),
        (ChannelClosed(ASKED), ErrorCode.CHANNEL_CLOSED),
        (RequestFailed(ASKED, RESULT), ErrorCode.TIME_LIMIT),
        (RequestFailed(ASKED, RESULT._replace(error_code=None)), ErrorCode.NO_REPLY),
    ],
)
def test_every_error_has_its_code(error: DispatchError, code: ErrorCode) -> None:
    assert error.error_code is code


@pytest.mark.parametrize("position", [0, 3, 200])
def test_the_caret_stands_under_the_fault(position: int) -> None:
    pattern = "a" * position + "!" + "b" * 300

    _, line, caret = str(InvalidPattern(pattern, position, "no such sign")).split("\n")

    assert line[caret.index("^")] == "!"
    assert len(line) < 130


def test_all_faults_of_a_table_are_named() -> None:
    text = str(InvalidTable(["first", "second"], ErrorCode.INVALID_PARAMETER))

    assert "2 faults" in text
    assert "  - first\n  - second" in text


def test_a_missing_library_says_what_to_install() -> None:
    assert str(MissingExtra("ray", "ray")) == "ray is not installed: pip install 'raydispatch[ray]'."


@pytest.mark.parametrize(
    "error", [error for error in ERRORS if isinstance(error, CorrelationError)], ids=lambda error: type(error).__name__
)
def test_an_error_of_correlation_names_the_request_and_its_class(error: CorrelationError) -> None:
    assert error.correlation_id == ASKED
    assert str(ASKED) in str(error)
    assert "{" not in str(error)


def test_a_failed_request_tells_how_it_ended() -> None:
    assert str(RequestFailed(ASKED, RESULT)) == f"The request {ASKED} ended as timeout: a: too slow"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.NO_DISPATCHER, ErrorClass.ROUTING),
        (ErrorCode.NOT_A_COMMAND, ErrorClass.ROUTING),
        (ErrorCode.LATE_REPLY, ErrorClass.CORRELATION),
        (ErrorCode.CHANNEL_CLOSED, ErrorClass.CORRELATION),
        (ErrorCode.HANDLER_EXCEPTION, ErrorClass.DELIVERY),
        (ErrorCode.QUEUE_FULL, ErrorClass.DELIVERY),
        (ErrorCode.INVALID_STATE, ErrorClass.SYSTEM),
        (ErrorCode.SHUT_DOWN, ErrorClass.SYSTEM),
    ],
)
def test_every_code_belongs_to_a_class(code: ErrorCode, kind: ErrorClass) -> None:
    assert code.error_class is kind


def test_no_code_is_without_a_class_and_no_class_without_a_code() -> None:
    assert {code.error_class for code in ErrorCode} == set(ErrorClass)
