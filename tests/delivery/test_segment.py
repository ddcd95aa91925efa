"""Segments: messages as one run of bytes, and what is none of ours."""

from typing import Any
from uuid import UUID

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.delivery.segment import FORMAT, ID_BYTES, Segment
from raydispatch.errors import InvalidParameter, JournalCorrupt
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import restored

TOPIC, OTHER = "dev.order.events.v1", "dev.invoice.events.v1"


def message(number: int, topic: str = TOPIC, message_type: str = "Placed", key: str | None = None) -> tuple[str, Any]:
    return topic, Envelope(number, message_type=message_type, topic=topic, key=key, message_id=UUID(int=number))


def test_what_is_packed_comes_back() -> None:
    segment = Segment.of([message(1, key="a"), message(2, OTHER)], due=[None, 7.5], to=["billing", None])

    assert Segment.unpack(segment.pack()) == segment


def test_topic_and_type_stand_once_for_all_that_share_them() -> None:
    segment = Segment.of(
        [message(1), message(2, OTHER), message(3), message(4, message_type="Paid"), message(5, OTHER)]
    )

    assert segment.keys == [[TOPIC, "Placed"], [OTHER, "Placed"], [TOPIC, "Paid"]]
    assert segment.codes == [0, 1, 0, 2, 1]


def test_its_length_is_that_of_its_messages() -> None:
    assert [len(Segment.of([message(number) for number in range(count)])) for count in (0, 1, 9)] == [0, 1, 9]


def test_ids_stand_together_and_can_be_read_one_by_one() -> None:
    segment = Segment.of([message(number) for number in (7, 8, 9)])

    assert len(segment.ids) == 3 * ID_BYTES
    assert [UUID(bytes=segment.message_id(row)).int for row in range(3)] == [7, 8, 9]


def test_what_no_message_needs_takes_no_room() -> None:
    segment = Segment.of([message(1), message(2)])

    assert (segment.orders, segment.due, segment.to) == (None, None, None)


def test_a_key_of_one_message_is_a_place_for_the_keys_of_all() -> None:
    assert Segment.of([message(1), message(2, key="a")]).orders == [None, "a"]


def test_its_messages_can_be_restored_one_by_one() -> None:
    messages = [message(1, key="a"), message(2, OTHER), message(3, message_type="Paid")]

    segment = Segment.of(messages)

    found = [restored(blob, *segment.keys[code]) for blob, code in zip(segment.blobs, segment.codes, strict=True)]
    assert found == [envelope for _, envelope in messages]


def test_a_message_that_is_no_data_is_named() -> None:
    bad = Envelope(object())

    with pytest.raises(InvalidParameter, match=str(bad.message_id)):
        Segment.of([message(1), (TOPIC, bad)])


@pytest.mark.parametrize("words", [(TOPIC, "\ud800"), ("\ud800.events", "Placed")], ids=["type", "topic"])
def test_a_topic_or_a_type_that_is_no_text_is_refused(words: tuple[str, str]) -> None:
    topic, message_type = words

    with pytest.raises(InvalidParameter):
        Segment.of([message(1), message(2, topic, message_type)])


def test_less_some_messages_the_others_stay_as_they_were() -> None:
    messages = [message(1, key="a"), message(2, OTHER), message(3, key="b"), message(4)]
    segment = Segment.of(messages, due=[None, 1.0, 2.0, None], to=["x", None, "y", None])

    rest = segment.without([0, 2])

    assert (len(rest), rest.orders, rest.due, rest.to) == (2, [None, None], [1.0, None], [None, None])
    assert [UUID(bytes=rest.message_id(row)).int for row in range(2)] == [2, 4]
    assert [rest.keys[code] for code in rest.codes] == [[OTHER, "Placed"], [TOPIC, "Placed"]]
    assert rest.blobs == [segment.blobs[1], segment.blobs[3]]


def test_less_all_messages_it_is_empty() -> None:
    segment = Segment.of([message(1), message(2)])

    assert len(segment.without([0, 1])) == 0
    assert len(segment.without([])) == 2


IDS = st.integers(0, 2**128 - 1)
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(WORDS, WORDS, st.none() | WORDS, IDS, st.none() | st.floats(allow_nan=False), st.none() | WORDS),
        max_size=12,
    ),
    gone=st.sets(st.integers(0, 11)),
)
def test_segments_come_back_whatever_is_in_them(rows: list[Any], gone: set[int]) -> None:
    messages = [
        (topic, Envelope(kind, message_type=kind, topic=topic, key=key, message_id=UUID(int=number)))
        for topic, kind, key, number, _, _ in rows
    ]

    segment = Segment.of(messages, [row[4] for row in rows], [row[5] for row in rows])
    rest = Segment.unpack(segment.pack()).without([row for row in gone if row < len(rows)])

    stay = [row for row in range(len(rows)) if row not in gone]
    assert len(rest) == len(stay)
    for row, before in enumerate(stay):
        topic, kind = rest.keys[rest.codes[row]]
        envelope = restored(rest.blobs[row], topic, kind)
        assert envelope == messages[before][1]
        assert rest.message_id(row) == envelope.message_id.bytes
        assert envelope.key == (rest.orders[row] if rest.orders is not None else None)
        assert rest.due is not None
        assert rest.to is not None
        assert (rest.due[row], rest.to[row]) == (rows[before][4], rows[before][5])


# What is none of ours


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        b"\x80\x05]\x94.",
        msgpack.packb(7),
        msgpack.packb(None),
        msgpack.packb([]),
        Segment.of([message(1)]).pack()[:-1],
        Segment.of([message(1)]).pack() + b"\x00",
    ],
    ids=repr,
)
def test_bytes_that_are_no_segment_are_corrupt(data: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        Segment.unpack(data)


def test_another_format_is_refused_and_named() -> None:
    later = msgpack.packb((FORMAT + 1, "all", "else"))

    with pytest.raises(JournalCorrupt, match=f"format {FORMAT + 1}.*reads {FORMAT}"):
        Segment.unpack(later)


@pytest.mark.parametrize("count", [0, 6, 8])
def test_too_few_and_too_many_fields_are_corrupt(count: int) -> None:
    with pytest.raises(JournalCorrupt):
        Segment.unpack(msgpack.packb((FORMAT, *[None] * count)))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40).filter(lambda data: not data[1:].startswith(bytes([FORMAT]))))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        Segment.unpack(data)
