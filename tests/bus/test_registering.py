from collections.abc import Sequence
from typing import Any

import pytest

from raydispatch.bus.registering import Registering
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.errors import InvalidParameter, InvalidPattern
from raydispatch.messages.envelope import Envelope
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute
from raydispatch.settings import BreakerSettings, RetrySettings

EVENT = MessageCategory.EVENT


class Book(Registering):
    """Keeps everything together as it came."""

    def __init__(self) -> None:
        self.entries: list[tuple[list[DispatchRoute], DispatcherSpec | None]] = []

    def _add(self, routes: Sequence[DispatchRoute], spec: DispatcherSpec | None = None) -> None:
        self.entries.append((list(routes), spec))


async def quiet(envelope: Envelope[Any]) -> None: ...


def test_a_route_is_kept_alone() -> None:
    book = Book()
    route = DispatchRoute(route_id="r", topic_pattern="a.events", message_category=EVENT, dispatcher_id="a")

    book.register_route(route)

    assert book.entries == [([route], None)]


def test_a_dispatcher_is_kept_with_everything_that_was_said_of_it() -> None:
    book = Book()
    options: dict[str, Any] = {
        "breaker": BreakerSettings(failure_threshold=2),
        "retry": RetrySettings(tries=2),
        "time_limit_seconds": 3.0,
        "replicas": 4,
        "node_kind": "effect",
    }

    book.register_dispatcher("a", quiet, EVENT, ["OrderPlaced"], **options)

    assert book.entries == [([], DispatcherSpec("a", quiet, EVENT, frozenset({"OrderPlaced"}), **options))]


def test_a_dispatcher_has_a_breaker_and_retries_unless_told_otherwise() -> None:
    book = Book()

    book.register_dispatcher("guarded", quiet, EVENT)
    book.register_dispatcher("bare", quiet, EVENT, breaker=None, retry=None)

    (_, guarded), (_, bare) = book.entries
    assert guarded is not None
    assert bare is not None
    assert (guarded.breaker, guarded.retry) == (BreakerSettings(), RetrySettings())
    assert (bare.breaker, bare.retry) == (None, None)


@pytest.mark.parametrize(
    ("topics", "ids"),
    [("a.events", ["billing"]), (["a.events"], ["billing"]), (["a.events", "b.*"], ["billing-1", "billing-2"])],
)
def test_the_decorator_keeps_a_dispatcher_and_its_routes_together(topics: str | list[str], ids: list[str]) -> None:
    book = Book()

    given_back = book.dispatcher("billing", topics=topics, category=EVENT, priority=7, replicas=2)(quiet)

    ((routes, spec),) = book.entries
    assert given_back is quiet
    assert [route.route_id for route in routes] == ids
    assert {(route.dispatcher_id, route.priority, route.message_category) for route in routes} == {
        ("billing", 7, EVENT)
    }
    assert spec is not None
    assert (spec.dispatcher_id, spec.replicas) == ("billing", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispatcher_id": " "}, "dispatcher_id"),
        ({"dispatcher": 7}, "callable"),
        ({"category": "news"}, "category"),
        ({"message_types": "OrderPlaced"}, "message_types"),
        ({"time_limit_seconds": 0}, "time_limit_seconds"),
        ({"replicas": 0}, "replicas"),
    ],
)
def test_a_mistake_is_raised_where_it_is_made_and_nothing_is_kept(options: dict[str, Any], words: str) -> None:
    book = Book()
    right: dict[str, Any] = {"dispatcher_id": "a", "dispatcher": quiet, "category": EVENT}

    with pytest.raises(InvalidParameter, match=words):
        book.register_dispatcher(**{**right, **options})

    assert book.entries == []


def test_a_pattern_that_cannot_be_read_is_raised_before_there_is_a_handler() -> None:
    with pytest.raises(InvalidPattern):
        Book().dispatcher("a", topics=["a.events", "a..events"], category=EVENT)
    with pytest.raises(InvalidParameter, match="dispatcher_id"):
        Book().dispatcher("", topics="a.events", category=EVENT)


def test_only_routes_are_registered_as_routes() -> None:
    wrong: Any = {"route_id": "r"}

    with pytest.raises(InvalidParameter, match="not dict"):
        Book().register_route(wrong)
