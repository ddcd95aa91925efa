"""The envelope: defaults, checks at birth, copies, pickling."""

import copy
import dataclasses
import pickle
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from raydispatch.errors import DispatchError, InvalidParameter
from raydispatch.messages.envelope import MAX_ID_LENGTH, REPLY_TO_HEADER, SESSION_HEADER, Envelope

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class OrderPlaced:
    """A payload class."""


def full_envelope() -> Envelope[Any]:
    return Envelope(
        {"order": 7},
        message_type="OrderPlaced",
        topic="dev.order.events.v1",
        key="customer-1",
        message_id=UUID(int=1),
        correlation_id=UUID(int=2),
        causation_id=UUID(int=3),
        traceparent=TRACEPARENT,
        headers={"tenant": "a"},
        attempt=2,
        hops=3,
    )


def test_an_envelope_has_defaults_for_everything_but_its_payload() -> None:
    envelope = Envelope("hello")

    assert envelope.payload == "hello"
    assert envelope.topic == ""
    assert envelope.key is None
    assert envelope.causation_id is None
    assert envelope.traceparent is None
    assert envelope.trace_id is None
    assert envelope.span_id is None
    assert dict(envelope.headers) == {}
    assert (envelope.attempt, envelope.hops) == (1, 0)


def test_each_envelope_has_ids_of_its_own() -> None:
    one, other = Envelope(1), Envelope(1)

    assert len({one.message_id, one.correlation_id, other.message_id, other.correlation_id}) == 4


@pytest.mark.parametrize(("payload", "name"), [(OrderPlaced(), "OrderPlaced"), ({}, "dict"), (b"", "bytes")])
def test_the_message_type_is_the_payloads_class_if_not_given(payload: object, name: str) -> None:
    assert Envelope(payload).message_type == name
    assert Envelope(payload, message_type="Other").message_type == "Other"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Envelope)])
def test_an_envelope_never_changes(field: str) -> None:
    envelope = Envelope(1)

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(envelope, field, None)


def test_headers_are_read_only_and_apart_from_the_callers() -> None:
    mine = {"tenant": "a"}

    envelope = Envelope(1, headers=mine)
    mine["tenant"] = "b"

    assert envelope.headers == {"tenant": "a"}
    with pytest.raises(TypeError):
        envelope.headers["tenant"] = "c"  # type: ignore[index]


@pytest.mark.parametrize("field", ["message_type", "key"])
def test_an_id_may_be_as_long_as_allowed_and_no_longer(field: str) -> None:
    longest = "x" * MAX_ID_LENGTH
    envelope = Envelope(1, **{field: longest})  # type: ignore[arg-type]

    assert getattr(envelope, field) == longest
    with pytest.raises(InvalidParameter, match=f"{field} must be a string of at most {MAX_ID_LENGTH}"):
        Envelope(1, **{field: longest + "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"message_type": 7}, "message_type must be a string"),
        ({"key": 7}, "key must be a string"),
        ({"message_id": "not-a-uuid"}, "must be UUIDs"),
        ({"correlation_id": None}, "must be UUIDs"),
        ({"headers": {"tenant": 1}}, "headers must map strings to strings"),
        ({"headers": {1: "tenant"}}, "headers must map strings to strings"),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidParameter, match=fault):
        Envelope(1, **arguments)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "hello",
        TRACEPARENT.upper(),
        TRACEPARENT + "-00",
        TRACEPARENT + "\n",
        TRACEPARENT[:-1],
        "01" + TRACEPARENT[2:],
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
    ],
)
def test_a_bad_traceparent_is_refused(traceparent: str) -> None:
    with pytest.raises(InvalidParameter, match="traceparent must read"):
        Envelope(1, traceparent=traceparent)


def test_a_very_long_traceparent_is_cut_in_the_message() -> None:
    with pytest.raises(DispatchError) as caught:
        Envelope(1, traceparent="x" * 10_000)

    assert len(str(caught.value)) < 200


def test_the_trace_and_span_ids_are_read_from_the_traceparent() -> None:
    envelope = Envelope(1, traceparent=TRACEPARENT)

    assert envelope.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert envelope.span_id == "00f067aa0ba902b7"


def test_a_copy_differs_in_what_was_asked_for_and_nothing_else() -> None:
    envelope = full_envelope()

    assert envelope.with_payload("p") == dataclasses.replace(envelope, payload="p")
    assert envelope.with_topic("t") == dataclasses.replace(envelope, topic="t")
    assert envelope.with_attempt(9) == dataclasses.replace(envelope, attempt=9)


def test_another_payload_keeps_the_message_type() -> None:
    assert Envelope({}).with_payload(OrderPlaced()).message_type == "dict"


@pytest.mark.parametrize("envelope", [full_envelope(), Envelope(b"x"), Envelope(None, key="k")])
def test_pickling_and_copying_keep_everything(envelope: Envelope[Any]) -> None:
    for restored in (pickle.loads(pickle.dumps(envelope)), copy.deepcopy(envelope)):
        assert restored == envelope
        assert dict(restored.headers) == dict(envelope.headers)


def test_headers_are_still_read_only_after_pickling() -> None:
    restored = pickle.loads(pickle.dumps(full_envelope()))

    with pytest.raises(TypeError):
        restored.headers["tenant"] = "b"


@pytest.mark.parametrize(
    "wrong",
    [
        {"causation_id": "not a uuid"},
        {"traceparent": 7},
        {"headers": MappingProxyType({"retries": 3})},
        {"headers": ["a", "b"]},
    ],
)
def test_what_is_not_of_its_type_is_refused_at_birth(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        Envelope({}, **wrong)


# Messages that cause messages


def test_a_follow_up_is_a_new_message_of_the_same_conversation() -> None:
    cause = full_envelope().in_session("job-1")

    follow_up = cause.follow_up({"invoice": 1}, "dev.invoice.events.v1", "InvoiceMade")

    assert (follow_up.payload, follow_up.topic, follow_up.message_type) == (
        {"invoice": 1}, "dev.invoice.events.v1", "InvoiceMade",
    )  # fmt: skip
    assert follow_up.message_id not in (cause.message_id, cause.correlation_id)
    assert (follow_up.correlation_id, follow_up.causation_id) == (cause.correlation_id, cause.message_id)
    assert (follow_up.key, follow_up.traceparent, follow_up.headers) == (cause.key, TRACEPARENT, cause.headers)
    assert (follow_up.attempt, follow_up.hops, follow_up.session_id) == (1, cause.hops + 1, "job-1")


def test_a_follow_up_is_named_after_its_payload_if_nothing_else_is_said() -> None:
    assert full_envelope().follow_up(OrderPlaced(), "a.events").message_type == "OrderPlaced"


def test_a_message_that_is_sent_on_keeps_what_it_says_and_gets_the_id_it_is_given() -> None:
    cause = full_envelope()

    sent = cause.sent_on("a.events", UUID(int=9))

    assert sent == dataclasses.replace(
        cause, topic="a.events", message_id=UUID(int=9), causation_id=cause.message_id, attempt=1, hops=cause.hops + 1
    )


def test_a_message_is_caused_by_another_and_stays_in_its_session() -> None:
    cause, made = full_envelope().in_session("job-1"), Envelope("p", topic="a.events", headers={"tenant": "b"})

    caused = made.caused_by(cause)

    assert caused == dataclasses.replace(
        made,
        causation_id=cause.message_id,
        hops=cause.hops + 1,
        headers={"tenant": "b", SESSION_HEADER: "job-1"},
    )


def test_a_cause_a_session_and_a_longer_way_of_its_own_stay() -> None:
    made = Envelope("p", causation_id=UUID(int=5), hops=9).in_session("job-2")

    caused = made.caused_by(full_envelope().in_session("job-1"))

    assert caused == made


def test_a_session_is_a_header_beside_the_others() -> None:
    envelope = full_envelope()

    inside = envelope.in_session("job-1")

    assert (envelope.session_id, inside.session_id) == (None, "job-1")
    assert inside.headers == {"tenant": "a", SESSION_HEADER: "job-1"}
    assert inside.in_session("job-2").session_id == "job-2"
    assert pickle.loads(pickle.dumps(inside)).session_id == "job-1"


def test_an_envelope_can_be_made_with_its_type_spelt_out() -> None:
    envelope = Envelope[int](7)

    assert (envelope.payload, envelope.message_type) == (7, "int")


@pytest.mark.parametrize("name", ["payload", "topic", "no_field_at_all"])
def test_nothing_changes_after_birth(name: str) -> None:
    envelope = Envelope(7)

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(envelope, name, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(envelope, name)


def test_envelopes_have_no_subclasses() -> None:
    with pytest.raises(TypeError, match="no subclasses"):
        type("Special", (Envelope,), {})


def test_who_waits_for_a_reply_is_remembered_along_the_chain() -> None:
    asked = Envelope(1, message_type="Ask", headers={REPLY_TO_HEADER: "asker"})

    caused = Envelope(2, message_type="Tell", correlation_id=asked.correlation_id).caused_by(asked)
    other = Envelope(2, message_type="Tell").caused_by(asked)

    assert caused.headers.get(REPLY_TO_HEADER) == "asker"
    assert REPLY_TO_HEADER not in other.headers
