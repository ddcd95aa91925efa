"""Results from a delivery: the last step of a message's way back to its caller."""

from collections.abc import Sequence
from datetime import UTC, datetime

from raydispatch.actors.wire import Delivery, Item, Message, Parcel, Selection, unpack
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus, Outcome, combined_error, worst_status
from raydispatch.errors import ErrorCode
from raydispatch.messages.ids import new_id
from raydispatch.messages.topic import category_of

_SUCCESS = DispatchStatus.SUCCESS
_NO_TRACE = (None, None)


def results_of(
    delivery: Delivery,
    parcel: Parcel,
    messages: Sequence[Message],
    started_at: datetime,
    duration_ms: float,
) -> list[DispatchResult]:
    """One for each message, in order."""
    completed_at = datetime.now(UTC)
    categories = [category_of(topic) for topic, _ in parcel.keys]
    selections = delivery.by_key()
    lone = [targets[0] if fault is None and len(targets) == 1 else None for targets, fault in selections]
    results: list[DispatchResult] = []
    dispatcher_id: str | None
    route_id: str | None
    outcomes: tuple[Outcome, ...]
    outputs: tuple[str, ...]
    is_flat = delivery.lone is not None
    for row, (key, envelope, _), items in zip(parcel.rows, messages, delivery.items, strict=True):
        target = lone[row]
        item = items if is_flat else items[0] if target is not None else None
        if target is not None and type(item) is float:
            # A plain success of one dispatcher, as most are: a quarter of the time that the other way takes.
            status, code, error, outputs = _SUCCESS, None, None, ()
            dispatcher_id, route_id = target
            outcomes = (unpack(item, dispatcher_id, route_id),)
        else:
            status, code, error, outcomes = _summary(selections[row], (items,) if is_flat else items)
            dispatcher_id, route_id = (outcomes[0].dispatcher_id, outcomes[0].route_id) if outcomes else (None, None)
            outputs = tuple([topic for one in outcomes if one.status is _SUCCESS for topic in one.outputs])
        trace = (envelope.trace_id, envelope.span_id) if envelope.traceparent is not None else _NO_TRACE
        values = (
            new_id(), status, key[0], categories[row], key[1], route_id, dispatcher_id, duration_ms, started_at,
            completed_at, outputs, error, code, envelope.correlation_id, *trace, outcomes, delivery.table_version,
        )  # fmt: skip
        results.append(tuple.__new__(DispatchResult, values))
    return results


def _summary(
    selection: Selection, items: Sequence[Item]
) -> tuple[DispatchStatus, ErrorCode | None, str | None, tuple[Outcome, ...]]:
    if selection.fault is not None:
        status, code, message = selection.fault
        return DispatchStatus(status), ErrorCode(code), message, ()
    outcomes = tuple([unpack(item, *target) for item, target in zip(items, selection.targets, strict=True)])
    status = worst_status(outcomes)
    if status is DispatchStatus.SUCCESS:
        return status, None, None, outcomes
    return status, *combined_error(outcomes, status), outcomes
