"""Rows of a DataFrame on their way: columns and codes, and never a Python object for each row.

The content (payloads, ids) stays in the object store and travels by reference. A router sees keys and codes only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raydispatch.actors.choices import Choice
from raydispatch.actors.wire import Selection
from raydispatch.dispatch.outcome import BADNESS, WORST_FIRST, DispatchStatus, Outcome
from raydispatch.errors import ErrorCode

Codes: TypeAlias = npt.NDArray[np.int32]
"""For each row, a position in some list."""
Positions: TypeAlias = npt.NDArray[np.int64] | None
"""Rows, by number; None means all."""


class RowKey(NamedTuple):
    """What decides where a row goes. Rows that share it are routed once."""

    topic: str | None
    message_type: str | None
    only: tuple[str, ...] | None = None
    """The dispatchers that it may go to, of those that the table selects; None means all of them."""
    fault: tuple[str, str, str] | None = None
    """Why it goes nowhere: status, error code, message."""


class Shipment(NamedTuple):
    """Rows on their way to a router."""

    keys: list[RowKey]
    codes: Codes
    """For each row, the position of its key."""
    content: list[Any]
    """One reference to the table of the rows' content; in a list, or Ray would fetch it for the router."""
    seconds: float
    hold_seconds: float = 0.0
    """How long rows of a dispatcher whose circuit is open may wait for it."""
    resent: bool = False

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.codes)

    def call(self, router: Any) -> Any:
        """Give it to a router."""
        return router.route_rows.remote(self)

    def within(self, seconds: float) -> "Shipment":
        """The same, with so much time left."""
        return self._replace(seconds=seconds)

    def again(self) -> "Shipment":
        """The same, after a call with it was lost."""
        return self._replace(resent=True)

    def nowhere(
        self, code: ErrorCode, message: str, status: DispatchStatus = DispatchStatus.DISPATCHER_ERROR
    ) -> "RowDelivery":
        """What becomes of it if no router takes it."""
        return RowDelivery("", [Selection((), (status.value, code.value, message))] * len(self.keys), [])


class RowPart(NamedTuple):
    """Rows on their way to one replica."""

    keys: list[RowKey]
    route_ids: list[str]
    """For each key, the route that led here."""
    codes: Codes
    rows: Positions
    """Which rows of the content these are."""
    content: list[Any]
    resent: bool = False
    alone: bool = False
    """Whether nothing else may run beside it: it is suspected to kill its process."""

    def piece(self, start: int, end: int) -> "RowPart":
        """Some of them, one after the other."""
        rows = np.arange(start, min(end, len(self.codes))) if self.rows is None else self.rows[start:end]
        return self._replace(codes=self.codes[start:end], rows=rows)

    def take(self, positions: npt.NDArray[np.int64]) -> "RowPart":
        """Some of them."""
        rows = positions if self.rows is None else self.rows[positions]
        return self._replace(codes=self.codes[positions], rows=rows)


class RowReport(NamedTuple):
    """What became of rows at one dispatcher: each outcome that is different once, and a code for each row."""

    kinds: list[Outcome]
    """Without route and duration, which stand elsewhere."""
    codes: Codes | None
    """For each row, the position of its kind; None if there is one kind for all."""
    durations_ms: float | npt.NDArray[np.float32]
    """Of each row, or of all alike."""

    @classmethod
    def alike(cls, outcome: Outcome) -> "RowReport":
        """The same for all rows."""
        return cls([outcome], None, outcome.duration_ms)

    def codes_of(self, count: int) -> Codes:
        """The codes, written out."""
        return np.zeros(count, np.int32) if self.codes is None else self.codes

    def durations_of(self, count: int) -> npt.NDArray[np.float32]:
        """The durations, written out."""
        if isinstance(self.durations_ms, np.ndarray):
            return self.durations_ms
        return np.full(count, self.durations_ms, np.float32)


def joined(reports: Sequence[RowReport], positions: Sequence[npt.NDArray[np.int64]]) -> RowReport:
    """One report of several, each of which is about the rows at some positions."""
    if len(reports) == 1:
        return reports[0]
    total = sum(len(rows) for rows in positions)
    codes, durations = np.empty(total, np.int32), np.empty(total, np.float32)
    kinds: dict[Outcome, int] = {}
    for report, rows in zip(reports, positions, strict=True):
        numbers = np.array([kinds.setdefault(kind, len(kinds)) for kind in report.kinds], np.int32)
        codes[rows] = numbers[report.codes_of(len(rows))]
        durations[rows] = report.durations_of(len(rows))
    return RowReport(list(kinds), codes if len(kinds) > 1 else None, durations)


class RowsDone(NamedTuple):
    """What became of the rows of one dispatcher."""

    dispatcher_id: str
    rows: Positions
    report: RowReport


class RowDelivery(NamedTuple):
    """What became of a shipment."""

    table_version: str
    selections: list[Selection]
    """For each key."""
    parts: list[RowsDone]

    def statuses(self, codes: Codes) -> npt.NDArray[np.uint8]:
        """For each row, the badness of its worst outcome: a position in `WORST_FIRST`."""
        best = len(WORST_FIRST) - 1
        of_keys = np.array(
            [best if one.fault is None else BADNESS[DispatchStatus(one.fault[0])] for one in self.selections], np.uint8
        )
        statuses = of_keys[codes]
        for _, rows, report in self.parts:
            of_kinds = np.array([BADNESS[kind.status] for kind in report.kinds], np.uint8)
            found = of_kinds[0] if report.codes is None else of_kinds[report.codes]
            where = slice(None) if rows is None else rows
            statuses[where] = np.minimum(statuses[where], found)
        return statuses


def row_choice(choice: Choice, key: RowKey) -> Choice:
    """What the table says of a key, less what its rows must not do."""
    if key.fault is not None:
        return Choice(Selection((), key.fault), ())
    if key.only is None or choice.selection.fault is not None:
        return choice
    stages = tuple(tuple(target for target in stage if target[0] in key.only) for stage in choice.stages)
    stages = tuple(stage for stage in stages if stage)
    if not stages:
        words = f"of the dispatchers that it is for ({', '.join(key.only)}), none takes '{key.topic}' any more"
        fault = (DispatchStatus.NO_DISPATCHER.value, ErrorCode.NO_DISPATCHER.value, words)
        return Choice(Selection((), fault), ())
    return Choice(Selection(tuple(target for stage in stages for target in stage)), stages)


def split_rows(shipment: Shipment, choices: Sequence[Choice], stage: int) -> list[tuple[str, Positions, RowPart]]:
    """The parts of one stage: dispatcher id, which rows, and what is sent."""
    route_ids: dict[str, list[str]] = {}
    for code, choice in enumerate(choices):
        for dispatcher_id, route_id in choice.stages[stage] if stage < len(choice.stages) else ():
            route_ids.setdefault(dispatcher_id, [""] * len(choices))[code] = route_id
    parts: list[tuple[str, Positions, RowPart]] = []
    for dispatcher_id, routes in route_ids.items():
        takes = np.array([bool(route) for route in routes])
        rows = None if takes.all() else np.flatnonzero(takes[shipment.codes])
        codes = shipment.codes if rows is None else shipment.codes[rows]
        if len(codes):
            part = RowPart(shipment.keys, routes, codes, rows, shipment.content, shipment.resent)
            parts.append((dispatcher_id, rows, part))
    return parts
