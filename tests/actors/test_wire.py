import dataclasses
import pickle
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from raydispatch.actors.wire import as_data, decode, encode, pack, unpack
from raydispatch.dispatch.outcome import DispatchStatus, Outcome, Reply
from raydispatch.errors import ErrorCode, InvalidParameter
from raydispatch.messages.envelope import Envelope

uuids = st.uuids(version=4)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
texts = st.text(max_size=20)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope[Any]:
    trace, span = draw(st.integers(1, 2**128 - 1)), draw(st.integers(1, 2**64 - 1))
    return Envelope(
        draw(payloads),
        draw(texts.filter(bool)),
        draw(texts),
        draw(st.none() | texts),
        draw(uuids),
        draw(uuids),
        draw(st.none() | uuids),
        draw(st.none() | st.just(f"00-{trace:032x}-{span:016x}-01")),
        draw(st.dictionaries(texts, texts, max_size=3)),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 16)),
    )


# Messages


@given(envelope=envelopes())
def test_a_message_arrives_as_it_was_sent(envelope: Envelope[Any]) -> None:
    arrived = decode(encode(envelope), (envelope.topic, envelope.message_type))

    assert arrived == envelope
    assert type(arrived.message_id) is UUID
    assert arrived.headers == envelope.headers


def test_topic_and_type_are_those_of_the_key() -> None:
    arrived = decode(encode(Envelope(1, "Order", "dev.order.events.v1")), ("dev.other.events.v1", "Other"))

    assert (arrived.topic, arrived.message_type) == ("dev.other.events.v1", "Other")


def test_the_causation_id_of_number_zero_is_an_id_too() -> None:
    envelope = Envelope(1, causation_id=UUID(int=0))

    assert decode(encode(envelope), ("", "int")).causation_id == UUID(int=0)


def test_headers_arrive_as_read_only_as_they_were() -> None:
    arrived = decode(encode(Envelope(1, headers={"a": "b"})), ("", "int"))

    with pytest.raises(TypeError):
        arrived.headers["a"] = "c"  # type: ignore[index]


# What the main program defines


class Model(BaseModel):
    number: int


@dataclass
class Record:
    number: int
    inner: "Record | None" = None


class Plain:
    number = 7


@pytest.fixture
def main_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above, as if the program that was started had defined them."""
    main = ModuleType("__main__")
    for kind in (Model, Record, Plain):
        monkeypatch.setattr(kind, "__module__", "__main__")
        setattr(main, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "__main__", main)


def loaded_elsewhere(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The payload, as a worker reads it, whose main program is another one."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    return decode(blob, ("", "T")).payload


@pytest.mark.usefixtures("main_program")
def test_a_model_of_the_main_program_travels_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode(Envelope(Model(number=7)))

    assert loaded_elsewhere(blob, monkeypatch) == {"number": 7}


@pytest.mark.usefixtures("main_program")
def test_a_dataclass_of_the_main_program_travels_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode(Envelope(Record(7, Record(8))))

    assert loaded_elsewhere(blob, monkeypatch) == {"number": 7, "inner": {"number": 8, "inner": None}}


@pytest.mark.usefixtures("main_program")
def test_another_class_of_the_main_program_takes_its_definition_along(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode(Envelope(Plain()))

    assert loaded_elsewhere(blob, monkeypatch).number == 7


@pytest.mark.usefixtures("main_program")
def test_models_deep_inside_a_payload_can_be_read_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode(Envelope({"models": [Model(number=7)]}))

    (model,) = loaded_elsewhere(blob, monkeypatch)["models"]
    assert model.number == 7


def test_text_that_only_mentions_the_main_program_stays_as_it_is() -> None:
    payload = {"code": "if __name__ == '__main__': run()"}

    assert decode(encode(Envelope(payload)), ("", "dict")).payload == payload


def test_what_a_module_defines_travels_as_itself() -> None:
    record = Record(7)

    assert as_data(record) is record
    assert decode(encode(Envelope(record)), ("", "Record")).payload == record


@pytest.mark.usefixtures("main_program")
def test_a_class_as_a_payload_is_no_instance_of_it() -> None:
    assert as_data(Record) is Record
    assert as_data(Record(1)) == dataclasses.asdict(Record(1))


# What cannot travel


class Refusing:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


@pytest.mark.parametrize("payload", [threading.Lock(), Refusing(), (number for number in range(3))])
def test_a_payload_that_does_not_pickle_is_the_senders_mistake(payload: object) -> None:
    envelope = Envelope(payload)

    with pytest.raises(InvalidParameter) as caught:
        encode(envelope)

    words = str(caught.value)
    assert str(envelope.message_id) in words
    assert type(payload).__name__ in words


def test_a_local_function_does_not_keep_a_message_from_travelling_only_if_it_pickles() -> None:
    with pytest.raises(InvalidParameter, match="function"):
        encode(Envelope(lambda: None))


# Outcomes

PLAIN = Outcome("billing", DispatchStatus.SUCCESS, "route", (), 1, 2.5)


def test_a_plain_success_travels_as_its_duration_alone() -> None:
    item = pack(PLAIN)

    assert item == 2.5
    assert unpack(item, "billing", "route") == PLAIN


def test_the_duration_of_a_plain_success_is_told_from_an_outcome_though_it_be_a_whole_number() -> None:
    item = pack(PLAIN._replace(duration_ms=3))

    assert type(item) is float
    assert unpack(item, "billing", "route") == PLAIN._replace(duration_ms=3.0)


@pytest.mark.parametrize(
    "change",
    [
        {"status": DispatchStatus.SKIPPED},
        {"attempts": 2},
        {"attempts": 0},
        {"outputs": ("dev.invoice.events.v1",)},
        {"reply": Reply(None)},
        {"repeated": True},
        {"status": DispatchStatus.DISPATCHER_ERROR, "error_code": ErrorCode.REPLICA_LOST, "error_message": "gone"},
    ],
)
def test_everything_else_travels_whole(change: dict[str, Any]) -> None:
    outcome = PLAIN._replace(**change)

    assert unpack(pickle.loads(pickle.dumps(pack(outcome))), "billing", "route") == outcome


@given(
    status=st.sampled_from(DispatchStatus),
    attempts=st.integers(0, 3),
    duration=st.floats(0, 1e6) | st.integers(0, 9),
    outputs=st.lists(texts, max_size=2).map(tuple),
    reply=st.none() | st.builds(Reply, payloads),
    repeated=st.booleans(),
)
def test_an_outcome_is_the_same_on_the_other_side(
    status: DispatchStatus,
    attempts: int,
    duration: float,
    outputs: tuple[str, ...],
    reply: Reply | None,
    repeated: bool,
) -> None:
    outcome = Outcome("billing", status, "route", outputs, attempts, duration, reply=reply, repeated=repeated)

    assert unpack(pack(outcome), "billing", "route") == outcome
