"""The command: on a Ray of its own, or in this process."""

from typing import Annotated

import typer
from rich.console import Console

from raydispatch.cli.demo.in_process import play_in_process

Messages = Annotated[int, typer.Option(help="How many messages to route; the load of later parts is on top.", min=1)]
Local = Annotated[bool, typer.Option("--local", help="In this process, without Ray: over in a second.")]


def demo(messages: Messages = 3_000, local: Local = False) -> None:
    """Send messages through a small shop and show what becomes of them: routing, a circuit breaker, scaling, a ledger.

    In the end, a DataFrame of 200,000 orders from Spark. It starts a Ray of its own on this machine, and ends it again.
    Takes about a minute.
    """
    console = Console()
    if local:
        play_in_process(console, messages)
        return
    # Here, not above: Ray takes a second to load, and the other commands don't need it.
    from raydispatch.cli.demo.story import play

    try:
        adds_up = play(console, messages)
    except KeyboardInterrupt:
        console.print("Stopped early; everything that the demo started is gone.")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if adds_up else 1)
