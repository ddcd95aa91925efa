"""Finds the system that a command is about: NAME, on the Ray cluster that RAY_ADDRESS or this machine gives."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem

Name = Annotated[
    str, typer.Argument(help="The system: the name of its engine, or the one that `deploy --name` gave it.")
]


def attach(name: str) -> "DispatchSystem":
    """Connect to the cluster and find the system; a sentence if there is no such cluster, or no such system."""
    # Here, not above: Ray takes a second to load, and the other commands don't need it.
    from raydispatch.actors.connect import connect
    from raydispatch.actors.system import DispatchSystem

    connect()
    return DispatchSystem.attach(name)
