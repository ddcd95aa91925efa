"""Batches: envelopes to columns and back, filled-in columns, splitting, merging, distinct keys."""

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydispatch.errors import InvalidParameter
from raydispatch.messages.batch import COLUMNS, MessageBatch
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory, category_of
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
payloads = st.binary(max_size=16) | texts | json_values
uuids = st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number))
envelopes = st.builds(
    Envelope,
    payloads,
    message_type=st.sampled_from(["OrderPlaced", "Other"]),
    key=st.none() | texts,
    message_id=uuids,
    correlation_id=uuids,
    causation_id=st.none() | uuids,
    traceparent=st.none() | st.just("00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
    headers=st.dictionaries(texts, texts, max_size=3),
    attempt=st.integers(1, 2**31 - 1),
    hops=st.integers(0, 2**31 - 1),
)
messages = st.lists(st.tuples(st.sampled_from(["dev.a.events", "dev.b.commands", "x"]), envelopes), max_size=6)

EVENT = MessageCategory.EVENT


def small_batch(count: int = 6) -> MessageBatch:
    return MessageBatch.from_envelopes((f"dev.t{i % 3}.events", Envelope(i, key=str(i))) for i in range(count))


def payloads_of(batch: MessageBatch) -> list[Any]:
    return [envelope.payload for _, envelope in batch.to_envelopes()]


def small_table() -> RouteTable:
    def route(route_id: str, pattern: str, category: MessageCategory, **more: Any) -> DispatchRoute:
        return DispatchRoute(
            route_id=route_id, topic_pattern=pattern, message_category=category, dispatcher_id=category.value, **more
        )

    routes = [
        route("all", "**", EVENT),
        route("typed", "dev.a.*", EVENT, message_type="A"),
        route("orders", "dev.*.commands", MessageCategory.COMMAND),
    ]
    return RouteTable(routes, {category.value: DispatcherTypes(category) for category in MessageCategory})


@given(messages)
@settings(max_examples=60, deadline=None)
def test_envelopes_come_back_as_they_went_in(sent: list[tuple[str, Envelope[Any]]]) -> None:
    batch = MessageBatch.from_envelopes(sent)

    received = list(batch.to_envelopes())

    assert len(batch) == len(sent)
    assert received == [(topic, envelope.with_topic(topic)) for topic, envelope in sent]
    assert [type(envelope.payload) for _, envelope in received] == [type(envelope.payload) for _, envelope in sent]


def test_a_payload_that_is_no_json_is_named() -> None:
    envelope = Envelope(object())

    with pytest.raises(InvalidParameter, match=rf"message {envelope.message_id} \(object\) is no data"):
        MessageBatch.from_envelopes([("dev.events", envelope)])


def test_missing_columns_are_filled_in() -> None:
    batch = MessageBatch.from_table(pa.table({"topic": ["dev.events", None], "payload": ["one", "two"]}))

    (topic, envelope), (no_topic, other) = batch.to_envelopes()

    assert batch.table.column_names == [*COLUMNS.names, "payload"]
    assert topic == "dev.events"
    assert no_topic is None
    assert (envelope.payload, other.payload) == ("one", "two")
    assert (envelope.message_type, envelope.topic, other.topic) == ("str", "dev.events", "")
    assert (envelope.attempt, envelope.hops, envelope.key, dict(envelope.headers)) == (1, 0, None, {})
    assert envelope.causation_id is None
    ids = {envelope.message_id, envelope.correlation_id, other.message_id, other.correlation_id}
    assert len(ids) == 4


def test_columns_that_are_there_are_kept_and_cast() -> None:
    identity = UUID(int=7)
    given_columns = {
        "payload": pa.array([{"order": 7}]),
        "topic": pa.array(["dev.events"], pa.large_string()).dictionary_encode(),
        "attempt": pa.array([3], pa.int64()),
        "message_id": pa.array([identity.bytes], pa.binary()),
        "message_type": ["OrderPlaced"],
    }

    batch = MessageBatch.from_table(pa.table(given_columns))
    [(topic, envelope)] = batch.to_envelopes()

    assert (topic, envelope.message_type, envelope.attempt) == ("dev.events", "OrderPlaced", 3)
    assert envelope.message_id == identity
    assert envelope.payload == {"order": 7}
    assert batch.table.schema.field("topic").type == pa.string()
    assert batch.table.schema.field("attempt").type == pa.int32()


def test_a_table_without_topic_or_payload_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="The table has no column payload; it has topic, key"):
        MessageBatch.from_table(pa.table({"topic": ["a"], "key": ["b"]}))
    with pytest.raises(InvalidParameter, match="no column payload and no topic"):
        MessageBatch.from_table(pa.table({"key": ["b"]}))


def test_an_unknown_column_is_named() -> None:
    table = pa.table({"topic": ["a"], "payload": ["b"], "zeta": [1], "colour": [1]})

    with pytest.raises(InvalidParameter, match="A batch has no column colour, zeta: put it into the payload"):
        MessageBatch.from_table(table)


def test_taking_follows_the_given_order() -> None:
    batch = small_batch()

    assert payloads_of(batch.take([4, 0, 4])) == [4, 0, 4]
    assert payloads_of(batch.take(pa.array([1, 2]))) == [1, 2]
    assert payloads_of(batch.take([])) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.sampled_from([None, pa.int32(), pa.uint64()]))
@settings(max_examples=40, deadline=None)
def test_what_was_split_merges_into_what_it_was(owners: list[int], kind: Any) -> None:
    batch = small_batch(len(owners))
    lists = [[row for row, owner in enumerate(owners) if owner == part] for part in range(3)]
    positions = lists if kind is None else [pa.array(rows, kind) for rows in lists]

    parts = batch.split(positions)

    assert [payloads_of(part) for part in parts] == lists
    assert MessageBatch.merge(parts, positions) == batch
    assert payloads_of(MessageBatch.merge(parts)) == [row for rows in lists for row in rows]


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="nothing to merge"):
        MessageBatch.merge([])


def test_batches_are_equal_by_content() -> None:
    batch = small_batch()

    assert batch == MessageBatch(batch.table)
    assert batch != small_batch()
    assert batch != "batch"
    assert repr(batch) == "<MessageBatch of 6>"


topics = st.none() | st.sampled_from(["dev.a.events", "DEV.A.events", "dev.b.commands", "no.category", "a..events", ""])
types = st.none() | st.sampled_from(["A", "B", ""])
chunks = st.lists(st.lists(st.tuples(topics, types), max_size=5), max_size=4)


@given(chunks)
@settings(max_examples=80, deadline=None)
def test_matching_a_batch_is_matching_row_by_row(rows_of_chunks: list[list[tuple[str | None, str | None]]]) -> None:
    table = small_table()
    schema = pa.schema({"topic": pa.string(), "message_type": pa.string(), "payload": pa.int64()})
    parts = [
        pa.table(
            {"topic": [t for t, _ in rows], "message_type": [m for _, m in rows], "payload": list(range(len(rows)))},
            schema=schema,
        )
        for rows in rows_of_chunks
    ]
    batch = MessageBatch.from_table(pa.concat_tables(parts) if parts else schema.empty_table())

    found = table.match_distinct(batch)

    rows = [row for part in rows_of_chunks for row in part]
    codes = found.codes.to_pylist()
    assert [found.keys[code] for code in codes] == rows
    assert len(found.keys) == len(set(rows))
    for code, (topic, message_type) in zip(codes, rows, strict=True):
        category = category_of(topic) if topic else None
        assert found.categories[code] is category
        expected = table.match(topic, category, message_type) if topic and category else ()
        assert found.matches[code].routes == expected
        selected = table.select(topic, category, message_type) if topic and category else ()
        assert found.matches[code].selected == selected


def test_topics_without_any_type_in_several_chunks_are_matched() -> None:
    topics = pa.chunked_array([["dev.a.events"], ["dev.b.commands", None], [], ["dev.a.events"]], pa.string())
    batch = MessageBatch.from_table(pa.table({"topic": topics, "payload": [1, 2, 3, 4]}))

    found = small_table().match_distinct(batch)

    ids = [[route.route_id for route in found.matches[code].routes] for code in found.codes.to_pylist()]
    assert ids == [["all"], ["orders"], [], ["all"]]


@pytest.mark.parametrize(
    "batch",
    [
        MessageBatch.from_envelopes([]),
        MessageBatch.from_table(pa.table({"topic": pa.array([], pa.string()), "payload": pa.array([], pa.string())})),
        MessageBatch(COLUMNS.append(pa.field("payload", pa.binary())).empty_table()),
    ],
)
def test_an_empty_batch_works_like_any_other(batch: MessageBatch) -> None:
    found = small_table().match_distinct(batch)

    assert len(batch) == 0
    assert list(batch.to_envelopes()) == []
    assert (found.keys, found.categories, found.matches, found.codes.to_pylist()) == ([], [], [], [])
    assert MessageBatch.merge(batch.split([[], []]), [[], []]) == batch


def test_text_that_is_no_unicode_is_named_too() -> None:
    with pytest.raises(InvalidParameter, match="is no data"):
        MessageBatch.from_envelopes([("dev.order.events.v1", Envelope("half a pair: \ud800"))])


def test_a_null_id_counts_as_not_given() -> None:
    table = pa.table(
        {
            "topic": ["dev.order.events.v1"] * 2,
            "payload": ["a", "b"],
            "message_id": pa.array([None, bytes(15) + b"\x01"], pa.binary(16)),
            "correlation_id": pa.nulls(2, pa.binary(16)),
        }
    )

    (_, first), (_, second) = MessageBatch.from_table(table).to_envelopes()

    assert second.message_id.int == 1
    assert first.message_id.int > 1
    assert first.correlation_id != second.correlation_id
