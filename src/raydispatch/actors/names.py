"""Names of actors: `attach` and restarted controllers find them by these."""

from raydispatch.errors import InvalidParameter

NAMESPACE = "raydispatch"
FORMAT = 1
"""Of what travels between processes; `attach` refuses a system of another one."""


def check_name(system: str) -> None:
    """A slash in it would make one system's actors look like another's."""
    if "/" in system or not system.strip():
        raise InvalidParameter(f"A system cannot be named {system!r}: give the engine a name without a slash.")


def system_prefix(system: str) -> str:
    """What the names of all its actors begin with."""
    return f"raydispatch/{system}/"


def controller_name(system: str) -> str:
    """The controller of a system."""
    return f"raydispatch/{system}/controller"


def router_name(system: str, number: int) -> str:
    """A router of a system."""
    return f"raydispatch/{system}/router/{number}"


def keeper_name(system: str) -> str:
    """Who keeps the journal of a system."""
    return f"raydispatch/{system}/keeper"


def replica_name(system: str, replica_id: str) -> str:
    """A replica of a dispatcher."""
    return f"raydispatch/{system}/replica/{replica_id}"
