"""The route table: frozen, content-hashed, the same in every process; it answers who gets a message."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from raydispatch.messages.topic import MessageCategory, category_of, segments_of
from raydispatch.routing.index import PatternIndex
from raydispatch.routing.route import DispatchRoute

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

    from raydispatch.messages.batch import MessageBatch

DEFAULT_CACHE_ENTRIES = 65_536


class DispatcherTypes(NamedTuple):
    """What a dispatcher is registered for: all that the table needs to know of it."""

    category: MessageCategory
    message_types: frozenset[str] | None = None


class Match(NamedTuple):
    """What the table says of one (topic, category, type)."""

    routes: tuple[DispatchRoute, ...]
    """Every route that matches, in order."""
    selected: tuple[DispatchRoute, ...]
    """The first route of each dispatcher; for a command, of the first dispatcher only."""


class DistinctMatches(NamedTuple):
    """What the table says of a batch: one match per distinct (topic, type), and which of them each row has."""

    keys: list[tuple[str | None, str | None]]
    categories: list[MessageCategory | None]
    matches: list[Match]
    codes: "ChunkedArray"
    """One index into the lists for each row."""


_NOTHING = Match((), ())


class RouteTable:
    """Immutable; made by `engine.freeze()`. Safe to use from many threads.

    Example: `table.match("dev.order.events.v1", MessageCategory.EVENT, "OrderPlaced")`.
    """

    def __init__(
        self,
        routes: Iterable[DispatchRoute],
        dispatchers: Mapping[str, DispatcherTypes],
        *,
        cache_entries: int = DEFAULT_CACHE_ENTRIES,
    ) -> None:
        self.routes = tuple(sorted(routes, key=lambda route: route.order))
        """Every route, disabled ones included, in the order in which matches stand."""
        self.dispatchers = dict(sorted(dispatchers.items()))
        self._cache_entries = cache_entries
        self._finders = {category: self._finder(category) for category in MessageCategory}
        # Two generations: a hit in the old one moves the entry to the new one, and when that is half of the limit,
        # the old one is let go. Nothing is ever evicted one by one, and no lock is needed: at worst, two threads look
        # up the same thing.
        self._recent: dict[tuple[str, MessageCategory, str | None], Match] = {}
        self._older: dict[tuple[str, MessageCategory, str | None], Match] = {}

    def match(
        self, topic: str, category: MessageCategory, message_type: str | None = None
    ) -> tuple[DispatchRoute, ...]:
        """All routes that take such a message, in order; the type filters of their dispatchers are applied."""
        key = (topic, category, message_type)
        found = self._recent.get(key)
        if found is None:
            found = self._look_up(key)
        return found.routes

    def first(self, topic: str, category: MessageCategory, message_type: str | None = None) -> DispatchRoute | None:
        """The first route in order, or None."""
        routes = self.match(topic, category, message_type)
        return routes[0] if routes else None

    def select(
        self, topic: str, category: MessageCategory, message_type: str | None = None
    ) -> tuple[DispatchRoute, ...]:
        """One route for each dispatcher that shall run: a dispatcher matched twice runs once, a command has one."""
        key = (topic, category, message_type)
        found = self._recent.get(key)
        if found is None:
            found = self._look_up(key)
        return found.selected

    def match_distinct(self, batch: "MessageBatch") -> DistinctMatches:
        """Match each distinct (topic, message type) of a batch once; no Python object is made per row."""
        keys, codes = batch.distinct_keys()
        categories = [category_of(topic) if topic else None for topic, _ in keys]
        matches = [
            _NOTHING if category is None or topic is None else self._match_key((topic, category, message_type))
            for (topic, message_type), category in zip(keys, categories, strict=True)
        ]
        return DistinctMatches(keys, categories, matches, codes)

    @cached_property
    def version(self) -> str:
        """A hash of the content: equal for equal tables, in every process and for every order of registration."""
        content = {
            "routes": sorted(
                (route.model_dump(mode="json") for route in self.routes), key=lambda r: str(r["route_id"])
            ),
            "dispatchers": {
                dispatcher_id: [category, None if types is None else sorted(types)]
                for dispatcher_id, (category, types) in self.dispatchers.items()
            },
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def types_of(self, route: DispatchRoute) -> frozenset[str] | None:
        """The message types that get through both the route's filter and its dispatcher's; None means all."""
        accepted = self.dispatchers[route.dispatcher_id].message_types
        if route.message_type is None:
            return accepted
        asked = frozenset((route.message_type,))
        return asked if accepted is None else asked & accepted

    def __len__(self) -> int:
        return len(self.routes)

    def __repr__(self) -> str:
        return f"<RouteTable {self.version}: {len(self.routes)} routes, {len(self.dispatchers)} dispatchers>"

    def __eq__(self, other: object) -> bool:
        return self.version == other.version if isinstance(other, RouteTable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.version)

    def __reduce__(self) -> tuple[object, ...]:
        # Only the content travels: it is a tenth of the compiled table, and compiling it again takes microseconds
        # a route.
        rows = [tuple(route.__dict__.values()) for route in self.routes]
        return _restore, (tuple(DispatchRoute.model_fields), rows, self.dispatchers, self._cache_entries)

    def _look_up(self, key: tuple[str, MessageCategory, str | None]) -> Match:
        """A match that is not among the recent ones; it is, afterwards."""
        found = self._older.get(key)
        if found is None:
            found = self._match_key(key)
        if len(self._recent) * 2 >= self._cache_entries:
            self._older, self._recent = self._recent, {}
        self._recent[key] = found
        return found

    def _match_key(self, key: tuple[str, MessageCategory, str | None]) -> Match:
        topic, category, message_type = key
        segments = segments_of(topic)
        if not segments:
            return _NOTHING
        leaves = self._finders[category].find(segments)
        if len(leaves) == 1 and leaves[0].alone is not None:
            return leaves[0].alone
        ranks: list[int] = []
        for leaf in leaves:
            ranks += leaf.any_type
            if leaf.by_type is not None and message_type is not None:
                ranks += leaf.by_type.get(message_type, ())
        ranks.sort()
        routes = tuple([self.routes[rank] for rank in ranks])
        return Match(routes, _selected(routes, category))

    def _finder(self, category: MessageCategory) -> "PatternIndex[_Leaf]":
        index: PatternIndex[_Leaf] = PatternIndex()
        for rank, route in enumerate(self.routes):
            if route.enabled and route.message_category is category:
                index.leaf(route.pattern, _Leaf).add(rank, route, self.types_of(route))
        index.compact()
        return index


def _selected(routes: tuple[DispatchRoute, ...], category: MessageCategory) -> tuple[DispatchRoute, ...]:
    if category is MessageCategory.COMMAND:
        return routes[:1]
    by_dispatcher: dict[str, DispatchRoute] = {}
    for route in routes:
        by_dispatcher.setdefault(route.dispatcher_id, route)
    return tuple(by_dispatcher.values())


def _restore(
    fields: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    dispatchers: Mapping[str, DispatcherTypes],
    cache_entries: int,
) -> RouteTable:
    # The rows come from a table, so that they are valid already.
    routes = [DispatchRoute.model_construct(**dict(zip(fields, row, strict=True))) for row in rows]
    return RouteTable(routes, dispatchers, cache_entries=cache_entries)


class _Leaf:
    """The ranks of the routes that share a pattern, by the message types they take."""

    __slots__ = ("alone", "any_type", "by_type")

    def __init__(self) -> None:
        self.any_type: tuple[int, ...] = ()
        self.by_type: dict[str, tuple[int, ...]] | None = None
        self.alone: Match | None = None
        """The answer for a topic that fits this pattern only, if one route for all types has it: the common case."""

    def add(self, rank: int, route: DispatchRoute, types: frozenset[str] | None) -> None:
        only = types is None and not self.any_type and self.by_type is None
        self.alone = Match((route,), (route,)) if only else None
        if types is None:
            self.any_type += (rank,)
            return
        if self.by_type is None:
            self.by_type = {}
        for name in types:
            self.by_type[name] = (*self.by_type.get(name, ()), rank)
