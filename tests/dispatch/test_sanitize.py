from typing import Annotated, Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from raydispatch.dispatch.sanitize import MASK, MAX_LENGTH, describe_exception, describe_validation, sanitize

PREFIXES = [
    "password=", "db_password=", "accessToken:", '"apiKey": "', "API_KEY=", "tokenSecret=", "bearer ", "client_secret:",
    "private-key ", "connection string ", "credentials=", "PASSWORD=",
]  # fmt: skip
ADDRESSES = ["postgres://u:{}@h/db", "redis://:{}@h", "https://user:{}@host/x"]

ANY_CHARACTER = st.characters(exclude_categories=["Cs"])
PIECES = st.one_of(ANY_CHARACTER, st.sampled_from("\"' \n\t\r\\;,.=:{}[]()#?%&"))
SECRETS = st.builds(
    lambda core, noise, order: "".join(order.sample([*core, *noise], len(core) + len(noise))),
    st.text("abcdefghijkmXYZ0123456789", min_size=4, max_size=12),
    st.lists(PIECES, max_size=8),
    st.randoms(use_true_random=False),
)
ADDRESS_SECRETS = SECRETS.map(lambda text: "".join(c for c in text if not c.isspace() and c not in "/@"))


class Account(BaseModel):
    name: str
    pin: int = 0

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        raise ValueError(f"bad {value}")


class Quoting(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        raise ValueError(f"bad {value!r}")


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


PET: TypeAdapter[Any] = TypeAdapter(Annotated[Cat | Dog, Field(discriminator="kind")])


def error_of(model: Any, value: object) -> ValidationError:
    adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(value)
    return caught.value


@given(prefix=st.sampled_from(PREFIXES), secret=SECRETS, before=st.sampled_from(["", "login failed: ", "{'user': 1, "]))
def test_a_secret_behind_its_name_never_gets_through(prefix: str, secret: str, before: str) -> None:
    text = f"{before}{prefix}{secret}"
    assume(secret not in f"{before}{prefix}={MASK}")

    cleaned = sanitize(text)

    assert secret not in cleaned
    assert cleaned.endswith(MASK)
    assert cleaned.startswith(before)


@given(address=st.sampled_from(ADDRESSES), secret=ADDRESS_SECRETS)
def test_a_secret_in_an_address_never_gets_through(address: str, secret: str) -> None:
    assume(secret not in f"cannot reach {address}{MASK}")

    cleaned = sanitize(f"cannot reach {address.format(secret)}")

    assert secret not in cleaned
    assert cleaned.startswith("cannot reach ")


@pytest.mark.parametrize("filler", range(455, 500, 5))
def test_an_address_at_the_cut_does_not_show_half_a_secret(filler: int) -> None:
    text = "." * filler + "https://user:hunter2hunter2hunter2hunter2hunter2hunter2@host/x"

    assert "hunter" not in sanitize(text)


@given(prefix=st.sampled_from(PREFIXES), secret=SECRETS)
def test_an_exception_keeps_its_type_and_loses_its_secret(prefix: str, secret: str) -> None:
    assume(secret not in f"ConnectionError: no: {prefix}={MASK}")

    described = describe_exception(ConnectionError(f"no: {prefix}{secret}"))

    assert described.startswith("ConnectionError: no: ")
    assert secret not in described


@given(secret=SECRETS)
@settings(max_examples=60)
def test_a_payload_that_does_not_fit_is_described_without_its_values(secret: str) -> None:
    errors = [
        error_of(TypeAdapter(dict[str, Literal["yes"]]), {"field": secret}),
        error_of(TypeAdapter(dict[str, int]), {secret: "x"}),
        error_of(Account, {"name": secret}),
        error_of(Account, {"name": f"  {secret}  "}),
        error_of(Quoting, {"name": secret}),
        error_of(PET, {"kind": secret}),
    ]

    for error in errors:
        described = describe_exception(error)
        untold = describe_validation(error, frozenset(("name", "kind")))
        assert described.startswith("ValidationError: ")
        assume(secret not in "ValidationError: value_error union_tag_invalid Input should be 'yes'")
        assert secret not in described + untold
        assert repr(secret)[1:-1] not in described + untold


def test_only_declared_names_stand_in_the_place_of_a_fault() -> None:
    error = error_of(TypeAdapter(dict[str, Cat]), {"hunter2": {"kind": "cow"}})

    assert describe_validation(error, frozenset(("kind",))).startswith("*.kind: ")


def test_words_of_a_validator_that_do_not_repeat_the_input_are_kept() -> None:
    class Priced(BaseModel):
        price: int

        @field_validator("price")
        @classmethod
        def _is_positive(cls, value: int) -> int:
            raise ValueError("the price must be positive")

    assert "the price must be positive" in describe_exception(error_of(Priced, {"price": -77}))


@pytest.mark.parametrize(
    "text",
    [
        "the author is unknown",
        "cannot tokenize the text",
        "ask the secretary of the board",
        "CANNOT TOKENIZE THE TEXT",
        "The password.",
        'missing "token"',
        "see https://example.com/a for more",
    ],
)
def test_harmless_texts_are_left_alone(text: str) -> None:
    assert sanitize(text) == text


@pytest.mark.parametrize("text", ["x" * 2_000, "x" * 480 + " password=" + "y" * 400, "x" * 495 + "password=yyyy"])
def test_500_characters_at_most(text: str) -> None:
    assert len(sanitize(text)) <= MAX_LENGTH == 500
    assert len(describe_exception(ValueError(text))) <= MAX_LENGTH
    assert "yyy" not in sanitize(text)


def test_an_exception_without_words_is_its_type() -> None:
    assert describe_exception(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_exception_that_cannot_be_read_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe_exception(Mute()) == "Mute: (its text could not be read)"
