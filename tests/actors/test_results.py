from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tests.actors.fakes import EVENT, TOPIC, messages_of, orders

from raydispatch import Envelope
from raydispatch.actors.results import results_of
from raydispatch.actors.wire import Delivery, Item, Selection, parcel_of
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, Reply
from raydispatch.errors import ErrorCode

STARTED = datetime(2025, 1, 1, tzinfo=UTC)
ONE = Selection((("a", "to-a"),))
TWO = Selection((("a", "to-a"), ("b", "to-b")))
DOWN = Outcome("a", DispatchStatus.DISPATCHER_ERROR, "to-a", (), 3, 2.0, ErrorCode.HANDLER_EXCEPTION, "OSError", "down")
REFUSED = Outcome("b", DispatchStatus.CIRCUIT_OPEN, "to-b", error_code=ErrorCode.CIRCUIT_OPEN, error_message="open")


def results(
    pairs: Sequence[tuple[str, Envelope[Any]]], selections: list[Selection], items: list[list[Item]]
) -> list[DispatchResult]:
    messages = messages_of(pairs)
    return results_of(Delivery("v1", selections, items), parcel_of(messages, 5), messages, STARTED, 7.0)


def result(selection: Selection, *items: Item) -> DispatchResult:
    (found,) = results(orders(1), [selection], [list(items)])
    return found


def test_a_plain_success_says_who_handled_what_by_which_route() -> None:
    ((topic, envelope),) = orders(1)

    (found,) = results([(topic, envelope)], [ONE], [[2.5]])

    assert (found.status, found.dispatcher_id, found.route_id) == (DispatchStatus.SUCCESS, "a", "to-a")
    assert (found.topic, found.message_category, found.message_type) == (TOPIC, EVENT, "Order")
    assert (found.correlation_id, found.table_version) == (envelope.correlation_id, "v1")
    assert (found.error_code, found.error_message, found.outputs) == (None, None, ())
    assert found.outcomes == (Outcome("a", DispatchStatus.SUCCESS, "to-a", (), 1, 2.5),)


def test_a_result_tells_the_time_of_the_whole_call() -> None:
    found = result(ONE, 2.5)

    assert (found.started_at, found.duration_ms) == (STARTED, 7.0)
    assert found.completed_at is not None
    assert found.completed_at > STARTED


def test_every_result_has_an_id_of_its_own() -> None:
    found = results(orders(1, 2), [ONE], [[1.0], [1.0]])

    assert found[0].dispatch_id != found[1].dispatch_id


def test_results_stand_in_the_order_of_the_messages_each_by_the_selection_of_its_key() -> None:
    other = "dev.invoice.events.v1"
    pairs = [*orders(1), *orders(2, topic=other), *orders(3)]

    found = results(pairs, [ONE, Selection((("b", "to-b"),))], [[1.0], [2.0], [3.0]])

    assert [(one.topic, one.dispatcher_id) for one in found] == [(TOPIC, "a"), (other, "b"), (TOPIC, "a")]
    assert [one.outcomes[0].duration_ms for one in found] == [1.0, 2.0, 3.0]


def test_a_lone_outcome_that_is_no_plain_success_comes_as_it_is() -> None:
    outcome = Outcome("a", DispatchStatus.SUCCESS, "to-a", (TOPIC,), 2, 1.0, reply=Reply("yes"))

    found = result(ONE, outcome)

    assert (found.status, found.outcomes, found.reply) == (DispatchStatus.SUCCESS, (outcome,), Reply("yes"))


def test_a_fan_out_has_its_outcomes_in_order_and_is_named_after_the_first() -> None:
    found = result(TWO, 1.0, 2.0)

    assert (found.status, found.error_code, found.error_message) == (DispatchStatus.SUCCESS, None, None)
    assert [(one.dispatcher_id, one.route_id, one.duration_ms) for one in found.outcomes] == [
        ("a", "to-a", 1.0),
        ("b", "to-b", 2.0),
    ]
    assert (found.dispatcher_id, found.route_id) == ("a", "to-a")


def test_failures_are_combined_under_the_worst_of_them() -> None:
    found = result(TWO, DOWN, REFUSED)

    assert (found.status, found.error_code) == (DispatchStatus.DISPATCHER_ERROR, ErrorCode.HANDLER_EXCEPTION)
    assert found.error_message == "a: down; b: open"


def test_one_failure_among_successes_is_the_status_of_the_whole() -> None:
    found = result(TWO, 1.0, REFUSED)

    assert (found.status, found.error_message) == (DispatchStatus.CIRCUIT_OPEN, "b: open")
    assert (found.dispatcher_id, len(found.outcomes)) == ("a", 2)


def test_a_fault_of_the_key_is_a_result_without_outcomes_and_without_a_dispatcher() -> None:
    found = result(Selection((), ("no_dispatcher", "no_dispatcher", "Nobody takes it.")))

    assert (found.status, found.error_code) == (DispatchStatus.NO_DISPATCHER, ErrorCode.NO_DISPATCHER)
    assert (found.error_message, found.outcomes) == ("Nobody takes it.", ())
    assert (found.dispatcher_id, found.route_id) == (None, None)


def test_outputs_are_listed_in_the_order_of_the_dispatchers() -> None:
    first = Outcome("a", DispatchStatus.SUCCESS, "to-a", ("x.events", "y.events"), 1)
    second = Outcome("b", DispatchStatus.SUCCESS, "to-b", ("z.events",), 1)

    assert result(TWO, first, second).outputs == ("x.events", "y.events", "z.events")


def test_outputs_that_went_nowhere_are_not_listed() -> None:
    failed = Outcome("a", DispatchStatus.PUBLISH_FAILED, "to-a", ("x.events",), 1, error_message="no room")

    assert result(ONE, failed).outputs == ()


def test_the_ids_of_a_trace_come_from_the_traceparent_and_only_from_there() -> None:
    traced = Envelope(1, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")

    found = results([(TOPIC, traced), (TOPIC, Envelope(2))], [ONE], [[1.0], [1.0]])

    assert [(one.trace_id, one.span_id) for one in found] == [("a" * 32, "b" * 16), (None, None)]


def test_a_delivery_to_nowhere_is_the_same_fault_for_every_message() -> None:
    messages = messages_of([*orders(1, 2), *orders(3, topic="dev.invoice.events.v1")])
    parcel = parcel_of(messages, 5)

    delivery = parcel.nowhere(ErrorCode.TIME_LIMIT, "too late", DispatchStatus.TIMEOUT)
    found = results_of(delivery, parcel, messages, STARTED, 1.0)

    assert [(one.status, one.error_code, one.error_message) for one in found] == [
        (DispatchStatus.TIMEOUT, ErrorCode.TIME_LIMIT, "too late")
    ] * 3
