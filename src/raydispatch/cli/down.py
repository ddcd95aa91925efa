"""`raydispatch down`: the end of a system."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch.cli.system import Name, attach


def down(
    name: Name,
    seconds: Annotated[float, typer.Option(help="How long what is under way may take to end.", min=0)] = 30.0,
) -> None:
    """Stop a system: let what is under way end, then end its actors. Exit code 1 if the time was too short for that."""
    console = Console()
    system = attach(name)
    with console.status(f"stopping '{escape(name)}'"):
        drained = system.stop(seconds)
    if not drained:
        console.print(
            f"[yellow]{escape(name)} is stopped[/yellow]; not everything was done within {seconds:g} s, and what was "
            "still under way was given up.",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)
    console.print(f"[green]{escape(name)} is stopped[/green]; everything was done in time.", highlight=False)
