"""Choices: where the messages of a key go by a table, and what each dispatcher gets of a parcel."""

from collections.abc import Sequence
from typing import NamedTuple

from raydispatch.actors.wire import Key, Parcel, Part, Selection
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.errors import ErrorCode
from raydispatch.messages.topic import category_of, topic_fault
from raydispatch.routing.table import RouteTable

MOST_CHOICES = 65_536
"""Of topic and type that are remembered."""


class Choice(NamedTuple):
    """Where the messages of a key go: in stages, one for each priority."""

    selection: Selection
    stages: tuple[tuple[tuple[str, str], ...], ...]
    lone: str | None = None
    """The dispatcher, if it is the only one."""


class Choices:
    """What was chosen by a table before. Keys that share their routes share the object: it is then sent once, too."""

    def __init__(self) -> None:
        self._table: RouteTable | None = None
        self._by_key: dict[Key, Choice] = {}
        self._by_stages: dict[object, Choice] = {}

    def of(self, table: RouteTable, keys: Sequence[Key]) -> list[Choice]:
        """For each key, what is chosen by this table."""
        if table is not self._table or len(self._by_key) > MOST_CHOICES:
            self._table, self._by_key, self._by_stages = table, {}, {}
        known = self._by_key
        return [known.get(key) or self._chosen(table, key) for key in keys]

    def _chosen(self, table: RouteTable, key: Key) -> Choice:
        choice = _choose(table, key)
        if choice.selection.fault is None:
            choice = self._by_stages.setdefault(choice.stages, choice)
        self._by_key[key] = choice
        return choice


def _choose(table: RouteTable, key: Key) -> Choice:
    topic, message_type = key
    category = category_of(topic) if topic else None
    if category is None:
        status, code = DispatchStatus.INVALID_MESSAGE, ErrorCode.INVALID_TOPIC
        return Choice(Selection((), (status.value, code.value, topic_fault(topic) or "invalid topic")), ())
    routes = table.select(topic, category, message_type)
    if not routes:
        message = f"No dispatcher takes {category} '{topic}' of type {message_type}."
        fault = (DispatchStatus.NO_DISPATCHER.value, ErrorCode.NO_DISPATCHER.value, message)
        return Choice(Selection((), fault), ())
    stages: list[list[tuple[str, str]]] = []
    priority: int | None = None
    for route in routes:
        if route.priority != priority:
            priority = route.priority
            stages.append([])
        stages[-1].append((route.dispatcher_id, route.route_id))
    targets = tuple(target for stage in stages for target in stage)
    return Choice(Selection(targets), tuple(map(tuple, stages)), targets[0][0] if len(targets) == 1 else None)


def split(parcel: Parcel, choices: Sequence[Choice], stage: int) -> list[tuple[str, list[int], Part]]:
    """The parts of one stage: dispatcher id, the positions in the parcel, and what is sent."""
    route_ids: dict[str, list[str]] = {}
    for row, choice in enumerate(choices):
        if stage < len(choice.stages):
            for dispatcher_id, route_id in choice.stages[stage]:
                route_ids.setdefault(dispatcher_id, [""] * len(choices))[row] = route_id
    positions: dict[str, list[int]] = {dispatcher_id: [] for dispatcher_id in route_ids}
    lists = [
        [positions[dispatcher_id] for dispatcher_id, _ in choice.stages[stage]] if stage < len(choice.stages) else []
        for choice in choices
    ]
    for position, row in enumerate(parcel.rows):
        for members in lists[row]:
            members.append(position)
    parts = []
    for dispatcher_id, members in positions.items():
        whole = len(members) == len(parcel.rows)
        rows = parcel.rows if whole else [parcel.rows[position] for position in members]
        blobs = parcel.blobs if whole else [parcel.blobs[position] for position in members]
        part = Part(parcel.keys, rows, route_ids[dispatcher_id], blobs, parcel.resent)
        parts.append((dispatcher_id, members, part))
    return parts
