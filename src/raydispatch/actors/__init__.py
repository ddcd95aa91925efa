"""The engine on Ray: routers, replicas of dispatchers, a controller, and gateways in front of them."""

from raydispatch.errors import MissingExtra

try:
    import ray  # noqa: F401 - only to see whether it is there
except ImportError:
    raise MissingExtra("Ray", "ray") from None

from raydispatch.actors.status import DispatcherStatus, ReplicaStatus, RouterStatus, SystemStatus
from raydispatch.actors.system import DispatchSystem

__all__ = ["DispatchSystem", "DispatcherStatus", "ReplicaStatus", "RouterStatus", "SystemStatus"]
