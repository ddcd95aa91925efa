"""A system that runs nowhere, for commands that only look at one."""

from typing import Any, Self

from raydispatch.actors.status import DispatcherStatus, ReplicaStatus, RouterStatus, SubscriptionInfo, SystemStatus
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.settings import DeliveryMode


def status_of(handled: int = 0, *, circuit: CircuitState = CircuitState.CLOSED, replicas: int = 1) -> SystemStatus:
    """A shop with one dispatcher and two routers, of which the second is away."""
    one = ReplicaStatus(replica_id="billing-1", alive=True, in_flight=7, running=4, handled=handled, restarts=2)
    others = [ReplicaStatus(replica_id=f"billing-{number}", alive=True) for number in range(2, replicas + 1)]
    billing = DispatcherStatus(dispatcher_id="billing", circuit=circuit, replicas=(one, *others))
    return SystemStatus(
        name="shop",
        table_version="abc",
        generation=1,
        routers=(
            RouterStatus(name="router-1", alive=True, routed=handled, table_version="abc"),
            RouterStatus(name="router-2", alive=False),
        ),
        dispatchers={"billing": billing},
        dead_letters=3,
    )


def subscription_of(name: str, *, reliable: bool = True) -> SubscriptionInfo:
    """One that is behind."""
    return SubscriptionInfo(
        name=name, mode=DeliveryMode.KEY_SHARED, reliable=reliable, consumers=2, lag=12_345_678, in_flight=64,
        waiting=1_000, position=99, acked=35, retried=17, given_up=5,
    )  # fmt: skip


class FakeSystem:
    """Each look at it finds 10 messages more."""

    def __init__(self, *, drains: bool = True) -> None:
        self.looks = 0
        self.replicas = 1
        self.is_open = True
        self.stopped_within: float | None = None
        self._drains = drains

    def status(self) -> SystemStatus:
        self.looks += 1
        return status_of(self.looks * 10, replicas=self.replicas)

    def scale(self, dispatcher_id: str, replicas: int) -> None:
        self.replicas = replicas

    def stop(self, seconds: float) -> bool:
        self.stopped_within = seconds
        return self._drains

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.is_open = False
