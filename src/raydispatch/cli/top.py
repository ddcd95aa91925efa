"""`raydispatch top`: a system, live."""

from time import sleep
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from raydispatch.cli.status import Watch, drawn
from raydispatch.cli.system import Name, attach


def top(
    name: Name,
    once: Annotated[bool, typer.Option("--once", help="One picture, and no more.")] = False,
) -> None:
    """Watch a system: what `status` shows, anew each second, until Ctrl-C."""
    console = Console()
    with attach(name) as system:
        watch = Watch(system)
        if once:
            watch.look()
            sleep(1)
            console.print(drawn(watch.look()))
            return
        try:
            with Live(drawn(watch.look()), console=console, auto_refresh=False) as live:
                while True:
                    sleep(1)
                    live.update(drawn(watch.look()), refresh=True)
        except KeyboardInterrupt:
            return
