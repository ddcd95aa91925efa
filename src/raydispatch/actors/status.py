"""What a running system tells of itself."""

from pydantic import BaseModel, ConfigDict, computed_field

from raydispatch.dispatch.breaker import CircuitState
from raydispatch.settings import DeliveryMode


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class RouterStatus(_Frozen):
    """One router."""

    name: str
    alive: bool
    in_flight: int = 0
    routed: int = 0
    restarts: int = 0
    table_version: str = ""
    pid: int | None = None


class ReplicaStatus(_Frozen):
    """One replica of a dispatcher."""

    replica_id: str
    alive: bool
    in_flight: int = 0
    """Accepted and not done."""
    running: int = 0
    """In a handler now."""
    handled: int = 0
    restarts: int = 0
    pid: int | None = None
    node: str | None = None


class DispatcherStatus(_Frozen):
    """One dispatcher and its replicas."""

    dispatcher_id: str
    circuit: CircuitState
    replicas: tuple[ReplicaStatus, ...]

    @computed_field  # type: ignore[prop-decorator]  # pydantic asks for this order
    @property
    def in_flight(self) -> int:
        """Messages that its replicas have accepted and not done."""
        return sum(replica.in_flight for replica in self.replicas)

    @computed_field  # type: ignore[prop-decorator]  # pydantic asks for this order
    @property
    def queue(self) -> int:
        """Messages that wait in its replicas for a handler."""
        return sum(max(0, replica.in_flight - replica.running) for replica in self.replicas)

    @computed_field  # type: ignore[prop-decorator]  # pydantic asks for this order
    @property
    def handled(self) -> int:
        """Messages done, by the replicas that run now."""
        return sum(replica.handled for replica in self.replicas)


class SubscriptionInfo(_Frozen):
    """One subscription to the journal."""

    name: str
    mode: DeliveryMode
    reliable: bool
    consumers: int
    lag: int
    """Messages in the journal beyond its safe cursor."""
    in_flight: int
    waiting: int
    """Taken from the journal and not delivered: for want of room, until a retry, or until they are due."""
    position: int
    acked: int
    retried: int
    given_up: int


class SystemStatus(_Frozen):
    """A system, as its controller sees it.

    Example: `system.status().dispatchers["billing"].circuit`.
    """

    name: str
    table_version: str
    generation: int
    """Counts the changes of the plan."""
    routers: tuple[RouterStatus, ...]
    dispatchers: dict[str, DispatcherStatus]
    messages_per_second: float = 0.0
    """Routed, over the last ten seconds or so."""
    dead_letters: int = 0
    subscriptions: tuple[SubscriptionInfo, ...] = ()
    has_lease: bool = False
    """Whether it stops by itself when its driver vanishes."""
