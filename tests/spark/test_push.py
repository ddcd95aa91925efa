"""Push without Ray: the line is a fake that writes down what it is given, and answers when it is told to."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pyarrow as pa
import pytest
import ray
from tests.actors.fakes import SETTINGS

from raydispatch.actors.rows import RowDelivery, RowKey, RowReport, RowsDone, Shipment
from raydispatch.actors.wire import Selection
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.messages.envelope import MAX_ID_LENGTH
from raydispatch.spark import push as module
from raydispatch.spark.ids import Occurrences
from raydispatch.spark.push import WINDOW, Order, push

TOPIC = "dev.order.events"
MAX_PAYLOAD_BYTES = 100
ORDER = Order("orders", "nowhere:1", SETTINGS, MAX_PAYLOAD_BYTES)
LONG = "x" * (MAX_PAYLOAD_BYTES + 1)
TRACE = "0af7651916cd43dd8448eb211c80319c"


class FakeLine:
    """Every row succeeds at dispatcher "a", unless its key has a fault."""

    def __init__(self) -> None:
        self.shipments: list[Shipment] = []
        self.noted: list[tuple[str, Mapping[str, int]]] = []
        self.under_way = 0
        self.most_under_way = 0

    def send_rows(self, shipment: Shipment) -> "Future[RowDelivery]":
        self.shipments.append(shipment)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return Answer(self, shipment)

    def note(self, job_id: str, counts: Mapping[str, int]) -> None:
        self.noted.append((job_id, counts))

    @property
    def shipment(self) -> Shipment:
        """The only one."""
        (one,) = self.shipments
        return one

    def row_keys(self) -> list[RowKey]:
        """For each row of the only shipment."""
        return [self.shipment.keys[code] for code in self.shipment.codes]

    def content(self) -> pa.Table:
        """What dispatchers would get of all shipments."""
        return pa.concat_tables([shipment.content[0] for shipment in self.shipments])


class Answer(Future[RowDelivery]):
    """Is there when it is asked for."""

    def __init__(self, line: FakeLine, shipment: Shipment) -> None:
        super().__init__()
        self._line = line
        self._shipment = shipment

    def result(self, timeout: float | None = None) -> RowDelivery:
        self._line.under_way -= 1
        keys, codes = self._shipment.keys, self._shipment.codes
        selections = [Selection((("a", "to-a"),) if key.fault is None else (), key.fault) for key in keys]
        rows = np.flatnonzero([keys[code].fault is None for code in codes])
        well = RowReport.alike(Outcome("a", DispatchStatus.SUCCESS, attempts=1))
        return RowDelivery("v1", selections, [RowsDone("a", rows, well)] if len(rows) else [])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> FakeLine:
    fake = FakeLine()
    monkeypatch.setattr(module, "_line", lambda order: fake)
    monkeypatch.setattr(ray, "put", lambda content: content)
    return fake


def batch_of(count: int, first: int = 0, **columns: Any) -> pa.RecordBatch:
    """Rows with a number as hash and payload, and what else is given."""
    numbers = range(first, first + count)
    hashes = pa.array(numbers, pa.int64())
    texts = pa.array([str(number) for number in numbers])
    given = {name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()}
    base = {"topic": pa.repeat(TOPIC, count), "payload": texts, "hash_1": hashes, "hash_2": hashes}
    return pa.RecordBatch.from_pydict({**base, **given})


def pushed(*batches: pa.RecordBatch, order: Order = ORDER, **options: Any) -> list[dict[str, Any]]:
    """The rows of the ledger."""
    return [row for ledger in push(order, iter(batches), **options) for row in ledger.to_pylist()]


def ends(rows: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(row["status"], row["error_code"]) for row in rows]


SUCCESS = ("success", None)
TOO_LARGE = ("invalid_message", "payload_too_large")
INVALID = ("invalid_message", "payload_invalid")


# Keys and codes


def test_rows_that_share_topic_and_type_share_a_key(line: FakeLine) -> None:
    topics = ["dev.a.events", "dev.b.events", "dev.a.events", "dev.a.events"]

    rows = pushed(batch_of(4, topic=topics, message_type=["Order", "Order", None, "Order"]))

    assert [(key.topic, key.message_type) for key in line.row_keys()] == [
        ("dev.a.events", "Order"), ("dev.b.events", "Order"), ("dev.a.events", None), ("dev.a.events", "Order"),
    ]  # fmt: skip
    assert len(line.shipment.keys) == 3
    assert [(row["topic"], row["message_type"]) for row in rows] == [
        (key.topic, key.message_type) for key in line.row_keys()
    ]


def test_one_type_for_all_makes_no_more_keys_than_topics(line: FakeLine) -> None:
    pushed(batch_of(3, topic=["dev.a.events", "dev.b.events", "dev.a.events"], message_type=["Order"] * 3))

    assert line.shipment.keys == [RowKey("dev.a.events", "Order"), RowKey("dev.b.events", "Order")]
    assert line.shipment.codes.tolist() == [0, 1, 0]


def test_rows_that_are_only_for_some_dispatchers_have_keys_of_their_own(line: FakeLine) -> None:
    pushed(batch_of(4, message_type=["Order", "Order", "Bill", "Order"], only=["a\nb", None, "a\nb", "a\nb"]))

    assert line.row_keys() == [
        RowKey(TOPIC, "Order", ("a", "b")), RowKey(TOPIC, "Order"), RowKey(TOPIC, "Bill", ("a", "b")),
        RowKey(TOPIC, "Order", ("a", "b")),
    ]  # fmt: skip


def test_a_row_without_a_topic_goes_nowhere(line: FakeLine) -> None:
    rows = pushed(batch_of(3, topic=[TOPIC, None, TOPIC]))

    assert ends(rows) == [SUCCESS, ("invalid_message", "invalid_topic"), SUCCESS]
    assert (rows[1]["topic"], rows[1]["error"], rows[1]["dispatchers"]) == (None, "it has no topic", [])
    assert line.row_keys()[1].fault == ("invalid_message", "invalid_topic", "it has no topic")


def test_of_several_faults_of_a_row_the_first_counts(line: FakeLine) -> None:
    rows = pushed(batch_of(2, topic=[None, TOPIC], payload=[LONG, LONG], correlation_id=["none", "none"]))

    assert ends(rows) == [("invalid_message", "invalid_topic"), TOO_LARGE]


# Faults


@pytest.mark.parametrize(
    "payload",
    [
        pa.array(["short", LONG, None]),
        pa.array(["short", LONG, None], pa.large_string()),
        pa.array([b"short", LONG.encode(), None]),
        pa.array([{"a": "short", "b": 1}, {"a": LONG, "b": 1}, {"a": None, "b": None}]),
        pa.array([{"a": {"b": ["short"]}}, {"a": {"b": [LONG[:50], None, LONG[50:]]}}, None]),
        pa.array([["short", "short"], [LONG[:50], LONG[50:]], []]),
        pa.array([[("key", "short")], [(LONG[:50], LONG[50:])], []], pa.map_(pa.string(), pa.string())),
        pa.array([[], [("key", [LONG])], [("key", None)]], pa.map_(pa.string(), pa.list_(pa.string()))),
    ],
    ids=lambda payload: str(payload.type),
)
def test_a_payload_is_too_large_whatever_it_is_packed_in(line: FakeLine, payload: pa.Array) -> None:
    # In a slice as well: there, what is inside of a column stands elsewhere.
    longer = pa.concat_arrays([payload, payload])

    rows = pushed(batch_of(3, payload=payload), batch_of(4, first=10, payload=longer.slice(1, 4)))

    assert ends(rows) == [SUCCESS, TOO_LARGE, SUCCESS, TOO_LARGE, SUCCESS, SUCCESS, TOO_LARGE]
    assert rows[1]["error"] == f"the payload has more than {MAX_PAYLOAD_BYTES} bytes"


@pytest.mark.parametrize(
    "payload",
    [
        pa.array([b"short", LONG.encode()], pa.large_binary()),
        pa.array([{"a": ["short"]}, {"a": [LONG]}], pa.struct([("a", pa.large_list(pa.string()))])),
        pa.array([{"a": ["short"]}, {"a": [LONG]}], pa.struct([("a", pa.list_(pa.string(), 1))])),
    ],
    ids=lambda payload: str(payload.type),
)
def test_a_payload_of_another_layout_is_too_large_as_well(line: FakeLine, payload: pa.Array) -> None:
    rows = pushed(batch_of(2, payload=payload))

    assert ends(rows)[1] == TOO_LARGE


def test_payloads_that_are_large_together_are_not_too_large(line: FakeLine) -> None:
    rows = pushed(batch_of(2, payload=[LONG[:-1], LONG[:-1]]))

    assert ends(rows) == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("name", ["key", "message_type"])
def test_a_long_key_or_type_is_a_fault_of_its_row(line: FakeLine, name: str) -> None:
    columns: dict[str, Any] = {name: ["x" * (MAX_ID_LENGTH + 1), "ü" * MAX_ID_LENGTH, None]}

    rows = pushed(batch_of(3, **columns))

    assert ends(rows) == [INVALID, SUCCESS, SUCCESS]
    assert rows[0]["error"] == f"its {name} has more than {MAX_ID_LENGTH} characters"


def test_a_correlation_id_that_is_no_uuid_is_a_fault_of_its_row(line: FakeLine) -> None:
    identity = uuid4()

    rows = pushed(batch_of(3, correlation_id=[str(identity), "order 7", None]))

    assert ends(rows) == [SUCCESS, INVALID, SUCCESS]
    assert rows[1]["error"] == "its correlation_id is no UUID"
    assert rows[0]["correlation_id"] == str(identity)
    assert rows[2]["correlation_id"] == rows[2]["row_id"]
    assert line.content()["correlation_id"].to_pylist()[0] == identity.bytes


# What dispatchers and the ledger get


def test_keys_and_traces_travel_and_a_trace_that_is_none_is_dropped(line: FakeLine) -> None:
    traceparent = f"00-{TRACE}-b7ad6b7169203331-01"

    rows = pushed(batch_of(3, key=["k", None, "l"], traceparent=[traceparent, "no trace", None]))

    assert line.content()["key"].to_pylist() == ["k", None, "l"]
    assert line.content()["traceparent"].to_pylist() == [traceparent, None, None]
    assert [row["trace_id"] for row in rows] == [TRACE, None, None]


def test_equal_rows_of_all_batches_have_different_ids(line: FakeLine) -> None:
    rows = pushed(batch_of(2), batch_of(3))

    ids = line.content()["message_id"].to_pylist()
    assert len(set(ids)) == 5
    assert [row["row_id"] for row in rows] == [str(UUID(bytes=one)) for one in ids]
    assert [row["correlation_id"] for row in rows] == [row["row_id"] for row in rows]


def test_rows_that_were_seen_before_are_told_apart_by_those_who_remember(line: FakeLine) -> None:
    occurrences = Occurrences()

    first, second = (pushed(batch_of(2), occurrences=occurrences) for _ in range(2))

    assert not {row["row_id"] for row in first} & {row["row_id"] for row in second}


def test_rows_with_ids_of_their_own_are_the_same_message_if_they_share_one(line: FakeLine) -> None:
    rows = pushed(batch_of(2, row_id=["7", "7"], hash_1=[7, 7], hash_2=[7, 7]))

    assert [row["row_id"] for row in rows] == ["7", "7"]
    assert len(set(line.content()["message_id"].to_pylist())) == 1


def test_rows_whose_own_id_is_missing_are_not_taken_for_one_another(line: FakeLine) -> None:
    rows = pushed(batch_of(3, row_id=["7", None, None], hash_1=[7, 1, 1], hash_2=[7, 1, 1]))

    sent = [
        one for one, key in zip(line.content()["message_id"].to_pylist(), line.row_keys(), strict=True) if not key.fault
    ]
    assert len(set(sent)) == len(sent)
    assert rows[0]["status"] == "success"


# Shipments


def test_a_large_batch_goes_in_pieces_that_are_not_too_large(line: FakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(1_000)
    monkeypatch.setattr(module, "MAX_SHIPMENT_BYTES", 5_000)

    rows = pushed(batch)

    assert [row["status"] for row in rows] == ["success"] * 1_000
    assert len(line.shipments) >= batch.nbytes // 5_000
    assert max(shipment.content[0].nbytes for shipment in line.shipments) <= 5_000
    assert line.content()["payload"].to_pylist() == [str(number) for number in range(1_000)]


def test_pieces_are_not_too_large_when_large_rows_stand_together(
    line: FakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = ["x"] * 900 + ["x" * 100] * 100
    monkeypatch.setattr(module, "MAX_SHIPMENT_BYTES", 5_000)

    pushed(batch_of(1_000, payload=payload))

    assert max(shipment.content[0].nbytes for shipment in line.shipments) <= 5_000
    assert line.content()["payload"].to_pylist() == payload


def test_a_row_that_is_larger_than_a_piece_goes_alone(line: FakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHIPMENT_BYTES", 10)

    rows = pushed(batch_of(3))

    assert [shipment.size for shipment in line.shipments] == [1, 1, 1]
    assert len(rows) == 3


def test_an_empty_batch_sends_nothing(line: FakeLine) -> None:
    assert pushed(batch_of(0, topic=pa.array([], pa.string()), payload=pa.array([], pa.string()))) == []
    assert line.shipments == []


def test_a_few_shipments_are_under_way_and_come_back_in_order(line: FakeLine) -> None:
    batches = [batch_of(2, first=10 * number) for number in range(2 * WINDOW)]

    ledgers = push(ORDER, iter(batches))
    first = next(ledgers)

    assert len(line.shipments) == WINDOW
    rest = list(ledgers)
    assert line.most_under_way == WINDOW
    assert line.under_way == 0
    ids = [row_id for ledger in [first, *rest] for row_id in ledger.column("row_id").to_pylist()]
    assert ids == [str(UUID(bytes=one)) for one in line.content()["message_id"].to_pylist()]


def test_rows_that_wait_for_a_circuit_have_that_much_more_time(line: FakeLine) -> None:
    pushed(batch_of(1), order=ORDER._replace(hold_seconds=60.0))

    assert line.shipment.seconds == SETTINGS.call_seconds + 60.0
    assert line.shipment.hold_seconds == 60.0


@pytest.mark.parametrize(("of_order", "of_task"), [(False, False), (True, False), (False, True)])
def test_rows_that_may_have_been_sent_before_say_so(line: FakeLine, of_order: bool, of_task: bool) -> None:
    pushed(batch_of(1), order=ORDER._replace(repeated=of_order), repeated=of_task)

    assert line.shipment.resent is (of_order or of_task)


# Progress


def test_progress_is_noted_for_each_shipment_of_a_job_that_somebody_watches(line: FakeLine) -> None:
    batches = [batch_of(3, topic=[TOPIC, None, TOPIC]), batch_of(2, first=10)]

    pushed(*batches, order=ORDER._replace(tell_as="job"))

    assert line.noted == [("job", {"success": 2, "invalid_message": 1}), ("job", {"success": 2})]


def test_nothing_is_noted_when_nobody_watches(line: FakeLine) -> None:
    pushed(batch_of(2))

    assert line.noted == []


def test_a_process_has_one_line_for_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(module, "_lines", {})
    monkeypatch.setattr(module, "join", joined.append)
    monkeypatch.setattr(module, "Line", lambda system, settings: (system, settings))

    lines: list[Any] = [module._line(ORDER), module._line(ORDER._replace(system="bills")), module._line(ORDER)]

    assert lines == [("orders", SETTINGS), ("bills", SETTINGS), ("orders", SETTINGS)]
    assert lines[0] is lines[2]
    assert joined == [ORDER.address] * 3
