"""Freezing: everything that was registered is checked, all faults are named at once, and the table is made."""

import logging
from collections.abc import Sequence

from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.errors import ErrorCode, InvalidTable
from raydispatch.routing.lint import command_overlaps
from raydispatch.routing.route import DispatchRoute
from raydispatch.routing.table import DispatcherTypes, RouteTable


def checked_table(
    routes: Sequence[DispatchRoute],
    specs: Sequence[DispatcherSpec],
    *,
    cache_entries: int,
    strict: bool = False,
    has_middleware: bool = False,
    has_journal: bool = True,
    log: logging.Logger,
) -> RouteTable:
    """The table, or `InvalidTable`. Overlapping command routes are faults with `strict`, else warnings."""
    by_id = {spec.dispatcher_id: spec for spec in specs}
    faults, code = _faults(routes, by_id)
    if has_middleware:
        # It sees single messages, and would have to answer for rows of a table.
        faults += [
            f"dispatcher '{spec.dispatcher_id}' takes batches, with which no middleware goes"
            for spec in specs
            if spec.batch
        ]
    if not has_journal:
        faults += [
            f"the outputs of dispatcher '{spec.dispatcher_id}' go to the journal, and there is none"
            for spec in specs
            if spec.outputs == "journal"
        ]
    if faults:
        raise InvalidTable(faults, code)
    types = {name: DispatcherTypes(spec.category, spec.message_types) for name, spec in by_id.items()}
    table = RouteTable(routes, types, cache_entries=cache_entries)
    overlaps, _ = command_overlaps(table)
    if overlaps and strict:
        raise InvalidTable([str(overlap) for overlap in overlaps], ErrorCode.INVALID_PARAMETER)
    for overlap in overlaps:
        log.warning("command routes overlap", extra={"overlap": str(overlap)})
    return table


def _faults(routes: Sequence[DispatchRoute], specs: dict[str, DispatcherSpec]) -> tuple[list[str], ErrorCode]:
    missing = [
        f"route '{route.route_id}' leads to the dispatcher '{route.dispatcher_id}', which is not registered"
        for route in routes
        if route.dispatcher_id not in specs
    ]
    misfits = [
        f"route '{route.route_id}' is for {route.message_category}s, its dispatcher '{route.dispatcher_id}' for "
        f"{specs[route.dispatcher_id].category}s"
        for route in routes
        if route.dispatcher_id in specs and route.message_category is not specs[route.dispatcher_id].category
    ]
    code = ErrorCode.ITEM_NOT_REGISTERED if missing else ErrorCode.INVALID_PARAMETER
    return sorted(missing) + sorted(misfits), code
