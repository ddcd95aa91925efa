from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch.dispatch.outcome import Reply
from raydispatch.dispatch.outputs import NOTHING, Outputs, read_output
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import SESSION_HEADER, Envelope

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARENT: Envelope[Any] = Envelope(
    {"order": 7},
    "OrderPlaced",
    "dev.order.events",
    key="customer-1",
    traceparent=TRACEPARENT,
    headers={"tenant": "a", SESSION_HEADER: "job-1"},
    attempt=3,
    hops=2,
)


def read(output: object) -> Outputs:
    return read_output(output, PARENT, "billing")


# What a handler may return


@pytest.mark.parametrize(
    ("output", "topics"),
    [
        (None, ()),
        ([], ()),
        ((), ()),
        ("a.events", ("a.events",)),
        (["a.events", "b.events"], ("a.events", "b.events")),
        (("a.events", "a.events"), ("a.events", "a.events")),
        (Envelope(1, topic="c.events"), ("c.events",)),
        (["a.events", Envelope(1, topic="c.events")], ("a.events", "c.events")),
    ],
)
def test_topics_and_envelopes_go_on_in_the_order_given(output: object, topics: tuple[str, ...]) -> None:
    outputs = read(output)

    assert (outputs.topics, outputs.reply) == (topics, None)


@pytest.mark.parametrize("output", [Reply(7), [Reply(7)], (Reply(7),)])
def test_a_reply_is_no_message(output: object) -> None:
    assert read(output) == Outputs((), Reply(7))


@pytest.mark.parametrize("payload", [None, [], ("a.events", "b.events"), Envelope(1)])
def test_a_reply_may_hold_anything(payload: object) -> None:
    assert read(Reply(payload)) == Outputs((), Reply(payload))


@pytest.mark.parametrize("output", [["a.events", Reply(7), "b.events"], [Reply(7), "a.events", "b.events"]])
def test_a_reply_may_stand_among_messages_and_does_not_change_their_ids(output: list[object]) -> None:
    outputs = read(output)

    assert outputs.reply == Reply(7)
    assert outputs.envelopes == read(["a.events", "b.events"]).envelopes


def test_nothing_is_nothing() -> None:
    assert read(None) is NOTHING


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (7, "it returned int"),
        ("", "it returned a blank topic"),
        (" ", "it returned a blank topic"),
        (b"a.events", "it returned bytes"),
        ({"a.events"}, "it returned set"),
        ({"a": 1}, "it returned dict"),
        (["a.events", None], "it returned a list of NoneType, a topic"),
        ([["a.events"]], "it returned a list of a list of a topic"),
        (Envelope(1), "it returned an Envelope without a topic"),
        ([Reply(1), Reply(2)], "it returned a list of Reply"),
    ],
)
def test_anything_else_is_a_mistake_that_is_described_by_its_shape(output: object, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        read(output)

    assert "a handler returns None, a topic" in str(caught.value)


def test_a_mistake_shows_no_value() -> None:
    with pytest.raises(InvalidParameter) as caught:
        read([{"password": "hunter2"}, "hunter2 is a topic"])

    assert "hunter2" not in str(caught.value)


# What goes on


def test_a_topic_gets_the_same_message_one_hop_further() -> None:
    (sent,) = read("a.events").envelopes

    assert (sent.payload, sent.message_type, sent.key) == (PARENT.payload, "OrderPlaced", "customer-1")
    assert (sent.topic, sent.hops, sent.attempt) == ("a.events", 3, 1)
    assert (sent.correlation_id, sent.causation_id) == (PARENT.correlation_id, PARENT.message_id)
    assert (sent.traceparent, sent.headers) == (TRACEPARENT, PARENT.headers)


def test_an_envelope_goes_as_it_is_with_its_cause_and_its_session() -> None:
    made = Envelope({"invoice": 1}, "InvoiceMade", "a.events", headers={"tenant": "b"})

    (sent,) = read(made).envelopes

    assert (sent.message_id, sent.correlation_id) == (made.message_id, made.correlation_id)
    assert (sent.causation_id, sent.hops) == (PARENT.message_id, 3)
    assert (sent.session_id, sent.headers["tenant"]) == ("job-1", "b")


def test_an_envelope_cannot_hide_how_far_it_has_come() -> None:
    fresh, farther = read([Envelope(1, topic="a.events", hops=-100), Envelope(1, topic="a.events", hops=9)]).envelopes

    assert (fresh.hops, farther.hops) == (3, 9)


# Ids


@given(
    st.lists(st.sampled_from(["a.events", "b.events", Reply(1)]), max_size=5).filter(lambda o: o.count(Reply(1)) < 2)
)
def test_a_rerun_makes_the_same_ids_and_no_two_outputs_share_one(output: list[object]) -> None:
    once, again = read(output), read_output(output, PARENT.with_attempt(4), "billing")

    ids = [envelope.message_id for envelope in once.envelopes]
    assert ids == [envelope.message_id for envelope in again.envelopes]
    assert len({PARENT.message_id, *ids}) == 1 + len(ids)


def test_ids_differ_from_parent_to_parent_and_from_dispatcher_to_dispatcher() -> None:
    ids = {
        read_output("a.events", parent, dispatcher_id).envelopes[0].message_id
        for parent in (PARENT, Envelope(1))
        for dispatcher_id in ("billing", "billing-2")
    }

    assert len(ids) == 4
