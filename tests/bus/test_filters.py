import logging
import pickle
from functools import partial
from typing import Any

import pytest

from raydispatch.bus.filters import Filter, at_most, not_types, only_sessions, only_types, passes
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import SESSION_HEADER, Envelope


def of_type(name: str) -> Envelope[Any]:
    return Envelope("hello", message_type=name)


def in_session(session_id: str) -> Envelope[Any]:
    return Envelope("hello", headers={SESSION_HEADER: session_id})


def nothing(envelope: Envelope[Any]) -> bool:
    return False


def everything(envelope: Envelope[Any]) -> bool:
    return True


def test_only_the_named_types_pass() -> None:
    only = only_types("A", "B")

    assert [only(of_type(name)) for name in "ABC"] == [True, True, False]


def test_all_but_the_named_types_pass() -> None:
    not_these = not_types("A", "B")

    assert [not_these(of_type(name)) for name in "ABC"] == [False, False, True]


def test_only_messages_of_the_named_sessions_pass() -> None:
    only = only_sessions("s1", "s2")

    assert [only(in_session(name)) for name in ("s1", "s2", "s3")] == [True, True, False]
    assert not only(Envelope("hello"))


def test_so_many_a_second_pass() -> None:
    seconds = 0.0
    limit = at_most(10, burst=2, now=lambda: seconds)

    at_once = [limit(Envelope(n)) for n in range(3)]
    seconds += 0.1
    later = [limit(Envelope(n)) for n in range(2)]

    assert at_once == [True, True, False]
    assert later == [True, False]


@pytest.mark.parametrize("make", [only_types, not_types, only_sessions])
@pytest.mark.parametrize("names", [(), (("A", "B"),), (None,)])
def test_names_must_be_given_one_by_one(make: Any, names: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidParameter, match="takes one or more strings"):
        make(*names)


def test_without_filters_every_message_passes() -> None:
    assert passes([], Envelope("hello")) is None


def test_a_message_passes_if_all_filters_let_it_through() -> None:
    assert passes([only_types("A"), everything, at_most(1)], of_type("A")) is None


class ByHand:
    def __call__(self, envelope: Envelope[Any]) -> bool:
        return False


class Named(ByHand):
    name = "my own"


@pytest.mark.parametrize(
    ("filter_", "name"),
    [
        (only_types("A"), "only_types"),
        (not_types("B"), "not_types"),
        (only_sessions("s1"), "only_sessions"),
        (nothing, "nothing"),
        (partial(nothing), "nothing"),
        (ByHand(), "ByHand"),
        (Named(), "my own"),
    ],
)
def test_the_filter_that_holds_a_message_back_is_named(filter_: Filter, name: str) -> None:
    assert passes([everything, filter_, everything], of_type("B")) == name


def test_the_first_that_holds_back_is_named_and_the_rest_are_not_asked() -> None:
    asked: list[str] = []

    def later(envelope: Envelope[Any]) -> bool:
        asked.append("later")
        return False

    assert passes([nothing, later], Envelope("hello")) == "nothing"
    assert asked == []


def test_a_rate_that_is_used_up_is_named() -> None:
    limit = at_most(1, now=lambda: 0.0)

    assert [passes([limit], Envelope(n)) for n in range(2)] == [None, "at_most"]


def test_a_filter_that_raises_lets_nothing_through_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(envelope: Envelope[Any]) -> bool:
        raise OSError("password=hunter2")

    envelope = Envelope("hello")
    reason = passes([broken, everything], envelope)

    (line,) = caplog.records
    fields = vars(line)
    assert reason == "broken"
    assert (line.levelno, line.message) == (logging.ERROR, "filter failed")
    assert (fields["filter"], fields["error_type"]) == ("broken", "OSError")
    assert fields["correlation_id"] == str(envelope.correlation_id)
    assert "hunter2" not in str(fields)


def test_an_async_filter_does_not_let_everything_through(caplog: pytest.LogCaptureFixture) -> None:
    async def mistaken(envelope: Envelope[Any]) -> bool:
        return False

    filter_: Any = mistaken

    assert passes([filter_], Envelope("hello")) == "mistaken"
    assert vars(caplog.records[0])["error"] == "TypeError: a filter must not be async"


@pytest.mark.parametrize("filter_", [only_types("A"), not_types("B"), only_sessions("s1"), at_most(1)])
def test_filters_can_be_pickled(filter_: Filter) -> None:
    envelope = Envelope("hello", message_type="A", headers={SESSION_HEADER: "s1"})

    arrived = pickle.loads(pickle.dumps(filter_))

    assert passes([arrived], envelope) is None
