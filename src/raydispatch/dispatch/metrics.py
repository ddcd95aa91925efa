"""Metrics: counted as messages pass, read as frozen models."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.messages.topic import MessageCategory

LATENCY_BUCKETS_MS = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0)
"""Upper bounds for dispatch."""
ROUTING_BUCKETS_MS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, *LATENCY_BUCKETS_MS)
"""The same with microseconds in front, for routing."""
OTHER_TOPICS = "(other)"

_SUCCESS = DispatchStatus.SUCCESS

CountedT = TypeVar("CountedT")

Counted: TypeAlias = tuple[str, MessageCategory | None, DispatchStatus, int]
"""How many dispatches to a topic ended in one way."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Latency(_Frozen):
    """How long something took, over many times."""

    count: int = 0
    total_ms: float = 0.0
    min_ms: float = 0.0
    max_ms: float = 0.0
    histogram: dict[str, int] = {}
    """Counts by bucket, `le_1ms` … `gt_10000ms`; each message is in one bucket."""

    @property
    def avg_ms(self) -> float:
        """The mean."""
        return self.total_ms / self.count if self.count else 0.0


class DispatcherMetrics(_Frozen):
    """What one dispatcher did."""

    dispatcher_id: str
    execution_count: int = 0
    """Outcomes of messages for which the handler ran."""
    refused_count: int = 0
    """Outcomes of messages for which it did not: open circuit, or a payload that does not fit."""
    statuses: dict[DispatchStatus, int] = {}
    latency: Latency = Latency()
    last_error_message: str | None = None
    last_execution_at: datetime | None = None

    @property
    def success_count(self) -> int:
        """Messages handled well."""
        return self.statuses.get(DispatchStatus.SUCCESS, 0)

    @property
    def error_count(self) -> int:
        """Messages that ended otherwise."""
        return sum(self.statuses.values()) - self.success_count

    @property
    def error_rate(self) -> float:
        """From 0 to 1."""
        total = sum(self.statuses.values())
        return self.error_count / total if total else 0.0

    @property
    def avg_latency_ms(self) -> float:
        """Mean time, retries and their pauses included."""
        return self.latency.avg_ms


class DispatchMetrics(_Frozen):
    """What an engine did. Immutable: `record_dispatch` gives a new one.

    Example: `print(f"{engine.get_structured_metrics().success_rate:.1%}")`.
    """

    total_dispatches: int = 0
    statuses: dict[DispatchStatus, int] = {}
    category_metrics: dict[MessageCategory, int] = {}
    topic_metrics: dict[str, int] = {}
    latency: Latency = Latency()
    routing: Latency = Latency()
    dispatcher_metrics: dict[str, DispatcherMetrics] = {}

    @property
    def success_rate(self) -> float:
        """From 0 to 1; 1 if nothing was dispatched."""
        successes = self.statuses.get(DispatchStatus.SUCCESS, 0)
        return successes / self.total_dispatches if self.total_dispatches else 1.0

    @property
    def error_rate(self) -> float:
        """From 0 to 1."""
        return 1.0 - self.success_rate

    @property
    def avg_latency_ms(self) -> float:
        """Mean time of a dispatch."""
        return self.latency.avg_ms

    @property
    def min_latency_ms(self) -> float:
        """The fastest."""
        return self.latency.min_ms

    @property
    def max_latency_ms(self) -> float:
        """The slowest."""
        return self.latency.max_ms

    @property
    def latency_histogram(self) -> dict[str, int]:
        """Counts by bucket."""
        return self.latency.histogram

    def get_dispatcher_metrics(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """One dispatcher's part, or None if it has had no message."""
        return self.dispatcher_metrics.get(dispatcher_id)

    def record_dispatch(
        self,
        *,
        duration_ms: float,
        success: bool,
        category: MessageCategory | None = None,
        dispatcher_id: str | None = None,
        topic: str | None = None,
        error_message: str | None = None,
    ) -> "DispatchMetrics":
        """The metrics with one dispatch more; this object stays as it is."""
        status = DispatchStatus.SUCCESS if success else DispatchStatus.DISPATCHER_ERROR
        outcome = Outcome(dispatcher_id or "", status, None, (), 1, duration_ms, None, None, error_message)
        recorder = MetricsRecorder(self)
        recorder.record(topic, category, status, duration_ms, 0.0, (outcome,) if dispatcher_id else ())
        return recorder.snapshot()


class MetricsRecorder:
    """Counts in place, under one lock, which is held for a microsecond and never across a handler."""

    def __init__(self, start: DispatchMetrics | None = None, most_topics: int = 1_000) -> None:
        start = start or DispatchMetrics()
        self._lock = threading.Lock()
        self._most_topics = most_topics
        self._statuses: dict[DispatchStatus, int] = dict(start.statuses)
        self._categories: dict[MessageCategory, int] = dict(start.category_metrics)
        self._topics: dict[str, int] = dict(start.topic_metrics)
        self._latency = _LatencyCounter(LATENCY_BUCKETS_MS, start.latency)
        self._routing = _LatencyCounter(ROUTING_BUCKETS_MS, start.routing)
        self._dispatchers = {name: _DispatcherCounter(name, part) for name, part in start.dispatcher_metrics.items()}

    def record(
        self,
        topic: str | None,
        category: MessageCategory | None,
        status: DispatchStatus,
        duration_ms: float,
        routing_ms: float,
        outcomes: Iterable[Outcome],
        at: datetime | None = None,
    ) -> None:
        """Count one dispatch, which ended at that time, or else just now."""
        with self._lock:
            self._statuses[status] = self._statuses.get(status, 0) + 1
            if category is not None:
                self._categories[category] = self._categories.get(category, 0) + 1
            if topic is not None:
                seen = self._topics.get(topic)
                if seen is None and len(self._topics) >= self._most_topics:
                    topic, seen = OTHER_TOPICS, self._topics.get(OTHER_TOPICS)
                self._topics[topic] = (seen or 0) + 1
            self._latency.add(duration_ms)
            self._routing.add(routing_ms)
            for outcome in outcomes:
                counter = self._dispatchers.get(outcome.dispatcher_id)
                if counter is None:
                    counter = self._dispatcher(outcome.dispatcher_id)
                counter.add(outcome, at)

    def record_many(self, counts: "Iterable[Counted]", duration_ms: float, routing_ms: float) -> None:
        """Count dispatches that went together, each of which took as long as all; their outcomes are counted elsewhere.

        The same as so many calls of `record`, at a tenth of the time.
        """
        with self._lock:
            total = 0
            for topic, category, status, count in counts:
                total += count
                self._statuses[status] = self._statuses.get(status, 0) + count
                if category is not None:
                    self._categories[category] = self._categories.get(category, 0) + count
                seen = self._topics.get(topic)
                if seen is None and len(self._topics) >= self._most_topics:
                    topic, seen = OTHER_TOPICS, self._topics.get(OTHER_TOPICS)
                self._topics[topic] = (seen or 0) + count
            if total:
                self._latency.add(duration_ms, total)
                self._routing.add(routing_ms, total)

    def record_outcome(self, outcome: Outcome, count: int = 1) -> None:
        """Count what one dispatcher did, so many times alike, where the dispatch as a whole is counted elsewhere."""
        with self._lock:
            self._dispatcher(outcome.dispatcher_id).add(outcome, count=count)

    def record_successes(self, dispatcher_id: str, durations_ms: Sequence[float], at: datetime) -> None:
        """Count what one dispatcher did well at the first try, the last of it at that time."""
        if durations_ms:
            with self._lock:
                self._dispatcher(dispatcher_id).add_successes(durations_ms, at)

    def add(self, other: DispatchMetrics) -> None:
        """Count all that somebody else has counted."""
        with self._lock:
            _add_counts(self._statuses, other.statuses)
            _add_counts(self._categories, other.category_metrics)
            for topic, count in other.topic_metrics.items():
                known = topic in self._topics or len(self._topics) < self._most_topics
                _add_counts(self._topics, {topic if known else OTHER_TOPICS: count})
            self._latency.join(other.latency)
            self._routing.join(other.routing)
            for name, part in other.dispatcher_metrics.items():
                self._dispatchers.setdefault(name, _DispatcherCounter(name)).join(part)

    def snapshot(self) -> DispatchMetrics:
        """A consistent picture of this moment."""
        with self._lock:
            return DispatchMetrics(
                total_dispatches=self._latency.count,
                statuses=dict(self._statuses),
                category_metrics=dict(self._categories),
                topic_metrics=dict(self._topics),
                latency=self._latency.snapshot(),
                routing=self._routing.snapshot(),
                dispatcher_metrics={name: counter.snapshot() for name, counter in self._dispatchers.items()},
            )

    def _dispatcher(self, dispatcher_id: str) -> "_DispatcherCounter":
        counter = self._dispatchers.get(dispatcher_id)
        if counter is None:
            counter = self._dispatchers[dispatcher_id] = _DispatcherCounter(dispatcher_id)
        return counter


class _LatencyCounter:
    __slots__ = ("bounds", "buckets", "count", "highest", "lowest", "total")

    def __init__(self, bounds: tuple[float, ...], start: Latency | None = None) -> None:
        self.bounds = bounds
        known: Mapping[str, int] = start.histogram if start else {}
        self.buckets = [known.get(label, 0) for label in bucket_labels(bounds)]
        self.count = start.count if start else 0
        self.total = start.total_ms if start else 0.0
        self.lowest = start.min_ms if start and start.count else float("inf")
        self.highest = start.max_ms if start else 0.0

    def add(self, duration_ms: float, count: int = 1) -> None:
        self.count += count
        self.total += duration_ms * count
        if duration_ms < self.lowest:
            self.lowest = duration_ms
        if duration_ms > self.highest:
            self.highest = duration_ms
        # Most are in the first bucket; to search for that would take a third of this method.
        self.buckets[0 if duration_ms <= self.bounds[0] else bisect_left(self.bounds, duration_ms)] += count

    def join(self, other: Latency) -> None:
        self.count += other.count
        self.total += other.total_ms
        if other.count:
            self.lowest = min(self.lowest, other.min_ms)
            self.highest = max(self.highest, other.max_ms)
        for position, label in enumerate(bucket_labels(self.bounds)):
            self.buckets[position] += other.histogram.get(label, 0)

    def snapshot(self) -> Latency:
        return Latency(
            count=self.count,
            total_ms=self.total,
            min_ms=self.lowest if self.count else 0.0,
            max_ms=self.highest,
            histogram=dict(zip(bucket_labels(self.bounds), self.buckets, strict=True)),
        )


class _DispatcherCounter:
    __slots__ = ("dispatcher_id", "executed", "last_at", "last_error", "latency", "refused", "statuses")

    def __init__(self, dispatcher_id: str, start: DispatcherMetrics | None = None) -> None:
        self.dispatcher_id = dispatcher_id
        self.executed = start.execution_count if start else 0
        self.refused = start.refused_count if start else 0
        self.statuses: dict[DispatchStatus, int] = dict(start.statuses) if start else {}
        self.latency = _LatencyCounter(LATENCY_BUCKETS_MS, start.latency if start else None)
        self.last_error = start.last_error_message if start else None
        self.last_at: Any = start.last_execution_at if start else None

    def add(self, outcome: Outcome, at: datetime | None = None, count: int = 1) -> None:
        self.statuses[outcome.status] = self.statuses.get(outcome.status, 0) + count
        if outcome.error_message is not None:
            self.last_error = outcome.error_message
        if outcome.attempts:
            self.executed += count
            self.latency.add(outcome.duration_ms, count)
            self.last_at = at or datetime.now(UTC)
        else:
            self.refused += count

    def add_successes(self, durations_ms: Sequence[float], at: datetime) -> None:
        self.statuses[_SUCCESS] = self.statuses.get(_SUCCESS, 0) + len(durations_ms)
        self.executed += len(durations_ms)
        for duration_ms in durations_ms:
            self.latency.add(duration_ms)
        if self.last_at is None or at > self.last_at:
            self.last_at = at

    def join(self, other: DispatcherMetrics) -> None:
        self.executed += other.execution_count
        self.refused += other.refused_count
        _add_counts(self.statuses, other.statuses)
        self.latency.join(other.latency)
        newer = other.last_execution_at and (self.last_at is None or other.last_execution_at > self.last_at)
        if other.last_error_message is not None and (newer or self.last_error is None):
            self.last_error = other.last_error_message
        if newer:
            self.last_at = other.last_execution_at

    def snapshot(self) -> DispatcherMetrics:
        return DispatcherMetrics(
            dispatcher_id=self.dispatcher_id,
            execution_count=self.executed,
            refused_count=self.refused,
            statuses=dict(self.statuses),
            latency=self.latency.snapshot(),
            last_error_message=self.last_error,
            last_execution_at=self.last_at,
        )


def _add_counts(mine: dict[CountedT, int], theirs: Mapping[CountedT, int]) -> None:
    for name, count in theirs.items():
        mine[name] = mine.get(name, 0) + count


def bucket_labels(bounds: tuple[float, ...]) -> list[str]:
    """`le_1ms`, `le_5ms`, …, `gt_10000ms`."""
    return [*(f"le_{bound:g}ms" for bound in bounds), f"gt_{bounds[-1]:g}ms"]
