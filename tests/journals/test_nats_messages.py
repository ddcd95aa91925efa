from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch import Envelope
from raydispatch.errors import InvalidParameter
from raydispatch.journals.nats_messages import body_of, envelope_of, headers_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def there_and_back(envelope: Envelope[Any]) -> Envelope[Any]:
    return envelope_of(body_of(envelope), headers_of(envelope), "stream/1", "Unknown")


def test_a_message_of_ours_comes_back_as_it_was() -> None:
    sent = Envelope({"order": 7}, "Order", key="customer", causation_id=uuid4(), traceparent=TRACE, hops=3)

    found = there_and_back(sent)

    for name in (
        "payload",
        "message_type",
        "key",
        "message_id",
        "correlation_id",
        "causation_id",
        "traceparent",
        "hops",
    ):
        assert getattr(found, name) == getattr(sent, name), name


@given(payload=st.dictionaries(st.text(), st.integers() | st.booleans() | st.none(), max_size=4))
def test_json_comes_back(payload: dict[str, Any]) -> None:
    assert there_and_back(Envelope(payload)).payload == payload


def test_a_foreign_message_has_the_same_id_each_time_it_is_delivered() -> None:
    first, again = (envelope_of(b"{}", None, "orders/7", "Order") for _ in range(2))
    other = envelope_of(b"{}", None, "orders/8", "Order")

    assert first.message_id == again.message_id
    assert first.message_id != other.message_id
    assert first.message_type == "Order"


def test_an_id_of_others_that_is_no_uuid_is_an_id_all_the_same() -> None:
    one = envelope_of(b"{}", {"Nats-Msg-Id": "order-7"}, "orders/7", "Order")
    same = envelope_of(b"{}", {"Nats-Msg-Id": "order-7"}, "orders/9", "Order")

    assert isinstance(one.message_id, UUID)
    assert one.message_id == same.message_id


def test_what_is_no_json_stays_bytes() -> None:
    assert envelope_of(b"\xff\xfe", None, "orders/7", "Order").payload == b"\xff\xfe"


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "none"},
        {"Raydispatch-Hops": "many"},
        {"Raydispatch-Correlation-Id": "x"},
        {"raydispatch-key": ""},
    ],
)
def test_headers_that_mean_something_else_break_nothing(headers: dict[str, str]) -> None:
    found = envelope_of(b"{}", headers, "orders/7", "Order")

    assert (found.traceparent, found.hops, found.key) == (None, 0, None)


def test_a_line_break_cannot_smuggle_in_another_header() -> None:
    headers = headers_of(Envelope({}, headers={"tenant": "acme\r\nNats-Msg-Id: forged"}))

    assert headers["tenant"] == "acme Nats-Msg-Id: forged"


def test_a_payload_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="cannot be written as JSON"):
        body_of(Envelope(object()))
