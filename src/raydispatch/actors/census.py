"""The census: what a controller knows of the actors of its system, counts of lost processes included."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from raydispatch.actors.replica import ReplicaLoad
from raydispatch.actors.router import RouterLoad
from raydispatch.actors.status import ReplicaStatus, RouterStatus
from raydispatch.dispatch.metrics import DispatchMetrics, MetricsRecorder

RATE_SECONDS = 10.0
"""Over which the rate is taken."""


class Census:
    """Loads and counts, as actors told them."""

    def __init__(self, most_topics: int, now: Callable[[], float]) -> None:
        self._most_topics = most_topics
        self._now = now
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._counts: dict[tuple[str, int], DispatchMetrics] = {}
        """The newest of each actor and process: what a lost process has counted stays."""
        self._routed_by: dict[tuple[str, int], int] = {}
        self._routed: deque[tuple[float, int]] = deque([(now(), 0)])
        """How many had been routed, and when that was."""

    def note(self, names: Mapping[str, Any], loads: list[Any], counts: list[Any]) -> None:
        """Take what actors answered; from those that are away, there is an exception."""
        for name, load, count in zip(names, loads, counts, strict=True):
            if isinstance(load, RouterLoad | ReplicaLoad) and isinstance(count, DispatchMetrics):
                self._note_pid(name, load.pid)
                known = self._counts.get((name, load.pid))
                if known is None or _size(count) >= _size(known):  # Else its heir has answered in its place.
                    self._counts[name, load.pid] = count
            if isinstance(load, RouterLoad):
                self._routed_by[name, load.pid] = load.routed
        if self._routed_by:
            self._sample(self.routed)

    @property
    def routed(self) -> int:
        """Messages, by all routers that were heard of."""
        return sum(self._routed_by.values())

    def forget_rate(self) -> None:
        """What was routed until now was not routed lately."""
        self._routed = deque([(self._now(), self.routed)])

    def metrics(self) -> DispatchMetrics:
        """Everything together."""
        total = MetricsRecorder(most_topics=self._most_topics)
        for part in self._counts.values():
            total.add(part)
        return total.snapshot()

    def rate(self, routed: int) -> float:
        """Messages per second, lately; whoever asks how often."""
        self._sample(routed)
        (before, count), (now, most) = self._routed[0], self._routed[-1]
        return (most - count) / (now - before) if now > before else 0.0

    def _sample(self, routed: int) -> None:
        now, routed = self._now(), max(routed, self._routed[-1][1])
        while len(self._routed) > 1 and now - self._routed[1][0] >= RATE_SECONDS:
            self._routed.popleft()
        self._routed.append((now, routed))

    def replica(self, replica_id: str, load: object) -> ReplicaStatus:
        """One replica, by what it answered."""
        if not isinstance(load, ReplicaLoad):
            return ReplicaStatus(replica_id=replica_id, alive=False, restarts=self._restarts.get(replica_id, 0))
        self._note_pid(replica_id, load.pid)
        return ReplicaStatus(
            replica_id=replica_id,
            alive=True,
            in_flight=load.in_flight,
            running=load.running,
            handled=load.handled,
            restarts=self._restarts.get(replica_id, 0),
            pid=load.pid,
            node=load.node,
        )

    def router(self, name: str, load: object) -> RouterStatus:
        """One router, by what it answered."""
        short = name.rsplit("/", 2)[-2] + "-" + name.rsplit("/", 1)[-1]
        if not isinstance(load, RouterLoad):
            return RouterStatus(name=short, alive=False, restarts=self._restarts.get(name, 0))
        self._note_pid(name, load.pid)
        self._routed_by[name, load.pid] = load.routed
        return RouterStatus(
            name=short,
            alive=True,
            in_flight=load.in_flight,
            routed=load.routed,
            restarts=self._restarts.get(name, 0),
            table_version=load.table_version,
            pid=load.pid,
        )

    def _note_pid(self, name: str, pid: int) -> None:
        if name in self._pids and self._pids[name] != pid:
            self._restarts[name] = self._restarts.get(name, 0) + 1
        self._pids[name] = pid


def _size(counts: DispatchMetrics) -> int:
    """Never less than before, as long as a process lives."""
    return counts.total_dispatches + sum(sum(one.statuses.values()) for one in counts.dispatcher_metrics.values())
