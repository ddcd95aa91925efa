"""`raydispatch scale`: more replicas of a dispatcher, or fewer."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch.cli.system import Name, attach
from raydispatch.errors import NotRegistered


def scale(
    name: Name,
    dispatcher: Annotated[str, typer.Argument(help="The dispatcher's id, such as billing.")],
    replicas: Annotated[int, typer.Argument(help="How many replicas it shall have.", min=1)],
) -> None:
    """Start or drain replicas of a dispatcher until there are so many. Messages flow meanwhile, and none is lost."""
    console = Console()
    with attach(name) as system:
        found = system.status().dispatchers.get(dispatcher)
        if found is None:
            raise NotRegistered("dispatcher", dispatcher)
        with console.status(f"scaling '{escape(dispatcher)}' to {replicas}"):
            system.scale(dispatcher, replicas)
        now = len(system.status().dispatchers[dispatcher].replicas)
    console.print(f"{escape(dispatcher)}: {len(found.replicas)} → {now} replicas", highlight=False)
