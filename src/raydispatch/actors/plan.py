"""The plan that a controller tells its routers, and a dispatcher as a router sees it: replicas, rule, circuit."""

import asyncio
from collections.abc import Collection, Mapping
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.rows import RowPart
from raydispatch.delivery.subscription import Rules
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.dispatch.endpoints import Endpoint, Endpoints
from raydispatch.routing.table import RouteTable
from raydispatch.settings import Delivery


class Rule(NamedTuple):
    """What a router must know of a dispatcher, beside where it is."""

    at_most_once: bool
    reject_when_full: bool
    tries: int
    """How many replicas a message may lose before it is given up."""
    batch: bool = False
    """Whether its handler takes tables, so that rows are best left together."""
    max_in_flight: int = 10_000
    """What one replica accepts."""
    way: Rules = Rules(Delivery())
    """How it gets what comes from the journal."""


class Plan(NamedTuple):
    """The controller's word to the routers: the table, and who runs. Always whole, so that no part of it is missed."""

    generation: int
    table: RouteTable
    replicas: Mapping[str, Mapping[str, Any]]
    """By dispatcher id and replica id: the handles."""
    rules: Mapping[str, Rule]
    circuits: Mapping[str, Circuit]
    memo: bytes = b""
    """What a restarted controller needs; no router reads it."""


class Target:
    """A dispatcher, as a router sees it."""

    def __init__(self, dispatcher_id: str) -> None:
        self.dispatcher_id = dispatcher_id
        self.endpoints: Endpoints[Any] = Endpoints(dispatcher_id)
        self.rule = Rule(False, False, 3)
        self._circuit = CLOSED
        self._closes_at = 0.0

    @property
    def circuit(self) -> Circuit:
        """As it is now."""
        return self._circuit._replace(seconds=max(0.0, self._closes_at - monotonic()))

    def adopt(self, replicas: Mapping[str, Any], rule: Rule) -> None:
        """These run now, by this rule; those that are known keep their health and their counts."""
        self.rule = rule
        for endpoint in self.endpoints.all():
            if endpoint.endpoint_id not in replicas:
                self.endpoints.leave(endpoint.endpoint_id)
        for replica_id, handle in replicas.items():
            if replica_id not in self.endpoints:
                self.endpoints.join(replica_id, handle)

    def follow(self, circuit: Circuit) -> None:
        """The controller's word on the circuit."""
        self._circuit = circuit
        self._closes_at = monotonic() + circuit.seconds

    def admits(self) -> bool:
        """Whether to call at all: an open circuit is refused here, without a call."""
        return self._circuit.state is CircuitState.CLOSED or monotonic() >= self._closes_at

    def pick(self, full: Collection[str] = ()) -> Endpoint[Any] | None:
        """A replica for the next part, none of these."""
        if self._circuit.state is not CircuitState.CLOSED and self._circuit.trial_replica is not None:
            # The trial is with one replica; the others would refuse.
            chosen = self.endpoints.get(self._circuit.trial_replica)
            if chosen is not None:
                return chosen if chosen.endpoint_id not in full else None
        return self.endpoints.pick(full)

    async def owners(self, ids: list[int]) -> list[Endpoint[Any] | None]:
        """For each message, the replica that knows it."""
        endpoints = self.endpoints.all()
        answers = await asyncio.gather(
            *(asyncio.wait_for(endpoint.target.known.remote(ids), 5) for endpoint in endpoints), return_exceptions=True
        )
        owners: list[Endpoint[Any] | None] = [None] * len(ids)
        for endpoint, known in zip(endpoints, answers, strict=True):
            if isinstance(known, list):
                owners = [endpoint if knows else owner for owner, knows in zip(owners, known, strict=True)]
        return owners

    async def row_owners(self, part: RowPart) -> list[tuple[Endpoint[Any] | None, npt.NDArray[np.int64]]]:
        """For every replica that knows some of the rows, which; and last, those that nobody knows."""
        endpoints = self.endpoints.all()
        answers = await asyncio.gather(
            *(asyncio.wait_for(endpoint.target.known_rows.remote(part), 30) for endpoint in endpoints),
            return_exceptions=True,
        )
        left = np.ones(len(part.codes), bool)
        owners: list[tuple[Endpoint[Any] | None, npt.NDArray[np.int64]]] = []
        for endpoint, known in zip(endpoints, answers, strict=True):
            if isinstance(known, np.ndarray) and (known & left).any():
                owners.append((endpoint, np.flatnonzero(known & left)))
                left &= ~known
        if left.any():
            owners.append((None, np.flatnonzero(left)))
        return owners
