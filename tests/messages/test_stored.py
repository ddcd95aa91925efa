"""Messages as data: what comes back, what is refused, and that nothing else is ever raised."""

import dataclasses
import math
import pickle
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, RootModel, computed_field, field_serializer

from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.stored import FIRST_BYTE, restored, stored

TOPIC = "dev.order.events.v1"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TABLE = pa.table({"order": [1, 2, 3], "customer": ["a", None, "c"]})


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Point(NamedTuple):
    x: int
    y: int


class Line(BaseModel):
    sku: str
    count: int = 1


class Order(BaseModel):
    order_id: UUID
    at: datetime
    total: Decimal
    lines: list[Line] = []


@dataclasses.dataclass
class Address:
    street: str
    since: date | None = None


@dataclasses.dataclass(frozen=True)
class Customer:
    name: str
    address: Address
    photo: bytes = b""


@dataclasses.dataclass(frozen=True)
class Coin:
    cents: int


@dataclasses.dataclass(slots=True)
class Node:
    value: int
    next: Any = None


def again(payload: object) -> Any:
    """A payload that was kept, and read again."""
    envelope = Envelope(payload, topic=TOPIC)
    return restored(stored(envelope), TOPIC, envelope.message_type).payload


def nested(depth: int) -> Any:
    value: Any = 7
    for _ in range(depth):
        value = [value]
    return value


def cycle_of(kind: str) -> Any:
    if kind == "list":
        items: list[Any] = []
        items.append(items)
        return items
    if kind == "dict":
        pairs: dict[str, Any] = {}
        pairs["self"] = pairs
        return pairs
    if kind == "dataclass":
        node = Node(1)
        node.next = node
        return node
    loop = Loose()
    loop.inner = loop
    return loop


class Loose(BaseModel):
    inner: Any = None


# What comes back


@pytest.mark.parametrize(
    "payload",
    [
        None,
        True,
        0,
        -(2**63),
        2**64 - 1,
        1.5,
        math.inf,
        "",
        "grüße, 你好, \U0001f600",
        b"",
        b"\x00\xff\xfe",
        [],
        {},
        {"order": 7, "lines": [{"sku": "a"}, {"sku": "b"}], "paid": None},
        {1: "a", None: "b", b"\xff": "c", 2.5: "d"},
        [[], {}, [None]],
    ],
    ids=repr,
)
def test_what_json_takes_and_bytes_come_back_as_they_were(payload: object) -> None:
    assert again(payload) == payload


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        ((1, 2), [1, 2]),
        (Point(1, 2), [1, 2]),
        ({3}, [3]),
        (frozenset({3}), [3]),
        (deque([1, 2]), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=1), "PT60S"),
        (UUID(int=7), str(UUID(int=7))),
        (Decimal("1.10"), "1.10"),
        (Path("/var/orders"), "/var/orders"),
        (Fraction(1, 3), "1/3"),
        (Colour.RED, "red"),
        (Size.LARGE, 3),
        ({"at": [date(2026, 1, 2)], "id": {UUID(int=7)}}, {"at": ["2026-01-02"], "id": [str(UUID(int=7))]}),
        ({date(2026, 1, 2): 1}, {"2026-01-02": 1}),
    ],
    ids=repr,
)
def test_what_json_has_no_word_for_becomes_what_is_nearest(payload: object, data: object) -> None:
    found = again(payload)

    assert found == data or (isinstance(payload, timedelta) and found in {"PT60S", "PT1M"})


def test_a_model_becomes_a_map_of_which_the_model_can_be_made_again() -> None:
    order = Order(
        order_id=UUID(int=7), at=datetime(2026, 1, 2, tzinfo=UTC), total=Decimal("1.10"), lines=[Line(sku="a")]
    )

    data = again(order)

    assert data == {
        "order_id": str(UUID(int=7)),
        "at": "2026-01-02T00:00:00Z",
        "total": "1.10",
        "lines": [{"sku": "a", "count": 1}],
    }
    assert Order.model_validate(data) == order


def test_a_model_with_a_root_becomes_what_the_root_is() -> None:
    assert again(RootModel[list[int]]([1, 2])) == [1, 2]


def test_models_inside_of_other_things_become_maps_too() -> None:
    assert again({"lines": [Line(sku="a"), Customer("Eve", Address("Elm"))]}) == {
        "lines": [
            {"sku": "a", "count": 1},
            {"name": "Eve", "address": {"street": "Elm", "since": None}, "photo": b""},
        ]
    }


def test_a_dataclass_becomes_a_map_and_so_do_those_inside_of_it() -> None:
    customer = Customer("Eve", Address("Elm", date(2026, 1, 2)), b"\xff\x00")

    assert again(customer) == {
        "name": "Eve",
        "address": {"street": "Elm", "since": "2026-01-02"},
        "photo": b"\xff\x00",
    }


def test_a_dataclass_with_slots_becomes_a_map() -> None:
    assert again(Node(1, Node(2))) == {"value": 1, "next": {"value": 2, "next": None}}


@pytest.mark.parametrize("payload", [TABLE, TABLE.slice(1, 1), TABLE.slice(0, 0), pa.table({})], ids=str)
def test_an_arrow_table_comes_back_as_a_table(payload: Any) -> None:
    assert again(payload).equals(payload)


def test_a_record_batch_comes_back_as_a_table() -> None:
    batch = TABLE.to_batches()[0]

    assert again(batch).equals(TABLE)


def test_a_table_may_stand_inside_of_other_data() -> None:
    found = again({"orders": TABLE, "day": 7, "more": [Customer("Eve", Address("Elm")), TABLE.slice(1)]})

    assert found["orders"].equals(TABLE)
    assert found["more"][1].equals(TABLE.slice(1))
    assert found["day"] == 7


def test_a_table_with_a_dictionary_comes_back() -> None:
    table = pa.table({"topic": pa.array(["a", "b", "a"]).dictionary_encode(), "at": pa.array([1, 2, 3], pa.int32())})

    assert again(table).equals(table)


def test_everything_else_of_an_envelope_comes_back_too() -> None:
    envelope = Envelope(
        {"order": 7},
        message_type="OrderPlaced",
        topic=TOPIC,
        key="customer-1",
        message_id=UUID(int=1),
        correlation_id=UUID(int=2),
        causation_id=UUID(int=3),
        traceparent=TRACEPARENT,
        headers={"tenant": "a"},
        attempt=2,
        hops=3,
    )

    assert restored(stored(envelope), TOPIC, "OrderPlaced") == envelope


def test_what_an_envelope_leaves_out_stays_left_out() -> None:
    envelope = Envelope(7, topic=TOPIC)

    found = restored(stored(envelope), TOPIC, envelope.message_type)

    assert found == envelope
    assert (found.key, found.causation_id, found.traceparent, dict(found.headers)) == (None, None, None, {})


def test_topic_and_type_are_those_that_stand_beside_it() -> None:
    data = stored(Envelope(7, message_type="Placed", topic=TOPIC))

    found = restored(data, "dev.other.events", "Other")

    assert (found.topic, found.message_type) == ("dev.other.events", "Other")


def test_headers_that_come_back_cannot_be_changed() -> None:
    found: Any = restored(stored(Envelope(7, headers={"tenant": "a"})), TOPIC, "int")

    with pytest.raises(TypeError):
        found.headers["tenant"] = "b"


def test_what_comes_back_can_be_stored_again() -> None:
    first = stored(Envelope({"orders": TABLE, "at": date(2026, 1, 2), "set": {1}}, message_type="Orders", topic=TOPIC))

    assert stored(restored(first, TOPIC, "Orders")) == first


def test_storing_leaves_the_payload_as_it_was() -> None:
    payload = {"address": Address("Elm"), "lines": [Line(sku="a")]}

    stored(Envelope(payload))

    assert payload == {"address": Address("Elm"), "lines": [Line(sku="a")]}


# How readers tell it from a pickle


@pytest.mark.parametrize("payload", [None, 7, "x" * 100_000, b"\x80\x05", [nested(50)] * 20, {"a": TABLE}], ids=type)
def test_the_first_byte_is_always_the_same(payload: object) -> None:
    assert stored(Envelope(payload))[0] == FIRST_BYTE


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_begins_with_that_byte(protocol: int) -> None:
    assert pickle.dumps(Envelope(7), protocol)[0] != FIRST_BYTE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(payload=JSON, key=st.none() | st.text(max_size=20), attempt=st.integers(1, 1_000), hops=st.integers(0, 16))
def test_data_comes_back_whatever_it_is(payload: object, key: str | None, attempt: int, hops: int) -> None:
    envelope = Envelope(payload, topic=TOPIC, key=key, attempt=attempt, hops=hops)

    data = stored(envelope)

    assert data[0] == FIRST_BYTE
    assert restored(data, TOPIC, envelope.message_type) == envelope


# What is refused


class Whatever:
    pass


class Opaque(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    lock: Any


class Picture(BaseModel):
    data: bytes


class Stubborn(BaseModel):
    value: int

    @field_serializer("value")
    def refuse(self, value: int) -> int:
        raise KeyError("not today")


REFUSED: dict[str, Any] = {
    "object": Whatever(),
    "function": stored,
    "class": Whatever,
    "module": math,
    "lock": Lock(),
    "exception": ValueError("x"),
    "range": range(3),
    "arrow array": pa.array([1]),
    "int above 64 bits": 2**64,
    "int below 64 bits": -(2**63) - 1,
    "int far above": 10**400,
    "surrogate": "\ud800",
    "surrogate in a key": {"\udfff": 1},
    "object inside": {"a": [1, {"b": Whatever()}]},
    "object in a dataclass": Node(1, Whatever()),
    "object in a model": Opaque(lock=Lock()),
    "object in a set": {Whatever()},
    "object as a key": {Whatever(): 1},
    "large int in a model": Loose(inner=2**70),
    "surrogate in a model": Loose(inner="\ud800"),
    "bytes of no text in a model": Picture(data=b"\xff"),
    "a model that does not want": Stubborn(value=1),
    "cyclic list": cycle_of("list"),
    "cyclic dict": cycle_of("dict"),
    "cyclic dataclass": cycle_of("dataclass"),
    "cyclic model": cycle_of("model"),
    "too deep": nested(100_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_data_is_refused(name: str) -> None:
    envelope = Envelope(REFUSED[name])

    with pytest.raises(InvalidParameter) as caught:
        stored(envelope)

    words = str(caught.value)
    assert str(envelope.message_id) in words
    assert type(envelope.payload).__name__ in words


def test_the_refusal_does_not_show_the_payload() -> None:
    payload = {"card": "4111-1111", "made_by": Whatever(), "name": "\ud800"}

    with pytest.raises(InvalidParameter) as caught:
        stored(Envelope(payload))

    assert "4111" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_the_deepest_data_that_is_taken_comes_back() -> None:
    def is_refused(depth: int) -> bool:
        try:
            stored(Envelope(nested(depth)))
        except InvalidParameter:
            return True
        return False

    deepest = bisect(range(10_000), False, key=is_refused) - 1
    found, depth = again(nested(deepest)), 0
    while isinstance(found, list):
        found, depth = found[0], depth + 1

    assert (found, depth) == (7, deepest)


@dataclasses.dataclass
class HalfMade:
    name: str = dataclasses.field(init=False)


class Computing(BaseModel):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        raise RuntimeError("no prices today")


def failing_generator() -> Any:
    yield 1
    raise KeyError("lost")


def deep_model() -> Loose:
    payload = Loose()
    for _ in range(5_000):
        payload = Loose.model_construct(inner=payload)
    return payload


@pytest.mark.parametrize(
    "make",
    [
        deep_model,
        HalfMade,
        Computing,
        failing_generator,
        lambda: memoryview(b"abcdef")[::2],
    ],
)
def test_a_payload_that_fails_while_it_is_read_is_refused_as_well(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidParameter):
        stored(Envelope(make()))


@pytest.mark.parametrize("key", [(1, 2), Point(1, 2), frozenset({1}), Coin(5)], ids=repr)
def test_a_key_of_several_parts_is_refused_or_can_be_read_again(key: Any) -> None:
    envelope = Envelope({"prices": {key: 3}})

    try:
        data = stored(envelope)
    except InvalidParameter:
        return

    assert list(restored(data, TOPIC, "dict").payload["prices"].values()) == [3]


@pytest.mark.parametrize(
    "make", [lambda: iter([1, 2]), lambda: (one for one in [1, 2]), lambda: map(int, "12")], ids=["list", "gen", "map"]
)
def test_what_can_be_read_only_once_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidParameter):
        stored(Envelope(make()))


@pytest.mark.parametrize("where", [{"key": "\ud800"}, {"headers": {"tenant": "\ud800"}}], ids=["key", "headers"])
def test_the_refusal_names_what_is_wrong(where: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(where))):
        stored(Envelope({"order": 7}, **where))


@settings(max_examples=150, deadline=None)
@given(
    payload=st.recursive(
        st.none()
        | st.integers()
        | st.text(alphabet=st.characters())
        | st.text(alphabet=st.characters(categories=["Cs"]), max_size=2)
        | st.decimals()
        | st.complex_numbers()
        | st.datetimes()
        | st.uuids()
        | st.fractions()
        | st.sampled_from([Whatever(), Colour.RED, Size.LARGE, TABLE, Lock()]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | st.builds(Node, st.integers(), inner)
            | st.builds(Loose, inner=inner)
        ),
        max_leaves=8,
    )
)
def test_a_payload_is_stored_or_refused_and_nothing_else_happens(payload: object) -> None:
    envelope = Envelope(payload, topic=TOPIC)

    try:
        data = stored(envelope)
    except InvalidParameter:
        return

    assert data[0] == FIRST_BYTE
    assert restored(data, TOPIC, envelope.message_type).message_id == envelope.message_id
