import pickle

import pytest

from raydispatch.errors import (
    CircuitOpen,
    DispatchError,
    DuplicateRegistration,
    ErrorCode,
    InvalidParameter,
    InvalidPattern,
    InvalidState,
    InvalidTable,
    MissingExtra,
    NotRegistered,
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
