import pytest
from pydantic import ValidationError

from raydispatch.actors import DispatcherStatus, ReplicaStatus, RouterStatus, SystemStatus
from raydispatch.dispatch.breaker import CircuitState


def make_status() -> SystemStatus:
    replicas = (
        ReplicaStatus(replica_id="billing-1", alive=True, in_flight=7, running=2, handled=100, pid=1),
        ReplicaStatus(replica_id="billing-2", alive=True, in_flight=1, running=1, handled=50, pid=2),
        ReplicaStatus(replica_id="billing-3", alive=False, restarts=1),
    )
    return SystemStatus(
        name="shop",
        table_version="abc",
        generation=3,
        routers=(RouterStatus(name="router-1", alive=True, routed=150),),
        dispatchers={
            "billing": DispatcherStatus(dispatcher_id="billing", circuit=CircuitState.OPEN, replicas=replicas)
        },
    )


def test_a_dispatcher_is_the_sum_of_its_replicas() -> None:
    billing = make_status().dispatchers["billing"]

    assert (billing.in_flight, billing.queue, billing.handled) == (8, 5, 150)


def test_a_queue_is_never_below_nothing() -> None:
    # The two counts are taken one after the other.
    odd = ReplicaStatus(replica_id="a-1", alive=True, in_flight=0, running=1)
    status = DispatcherStatus(dispatcher_id="a", circuit=CircuitState.CLOSED, replicas=(odd,))

    assert status.queue == 0


def test_a_status_does_not_change() -> None:
    status = make_status()

    with pytest.raises(ValidationError, match="frozen"):
        status.name = "other"


def test_a_status_survives_json() -> None:
    status = make_status()

    assert SystemStatus.model_validate_json(status.model_dump_json()) == status
