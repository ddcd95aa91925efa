"""`raydispatch deploy`: an engine on a Ray cluster, to stay."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch.cli.app import load_engine
from raydispatch.cli.status import Watch, drawn
from raydispatch.dispatch.registry import check_id
from raydispatch.settings import EngineSettings, JournalSettings

Engine = Annotated[
    str,
    typer.Argument(
        help="Where the engine is: MODULE:ENGINE, such as shop.orders:engine. Modules are found from this folder.",
        envvar="RAYDISPATCH_APP",
        metavar="MODULE:ENGINE",
        show_default=False,
    ),
]


def deploy(
    app: Engine,
    routers: Annotated[
        int | None, typer.Option(help="How many routers to start.", min=1, max=1_000, show_default="2")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the system.", show_default="the engine's name")] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            help="Where to keep durable messages: sqlite:///path/orders.db, or nats://host:4222.",
            metavar="URL",
            show_default="the engine's own, or none",
        ),
    ] = None,
) -> None:
    """Start an engine on the Ray cluster that runs. It stays when this command ends, until `raydispatch down`.

    The cluster is the one that RAY_ADDRESS names (host:port), or the one of this machine (`ray start --head`).
    """
    engine = load_engine(app)
    if name is not None:
        check_id("name", name)
        engine.name = name
    if journal is not None:
        engine.settings = _with_journal(engine.settings, journal)
    # Here, not above: Ray takes a second to load, and a mistake in the engine shows without it.
    from raydispatch.actors.connect import connect
    from raydispatch.actors.system import DispatchSystem

    console = Console()
    with console.status(f"starting '{escape(engine.name)}' on Ray"):
        connect()
        system = DispatchSystem.start(engine, routers=routers, lease=False)
    with system:
        console.print(drawn(Watch(system).look()))
    shown = escape(engine.name)
    console.print(
        f"Look at it with `raydispatch top {shown}`, stop it with `raydispatch down {shown}`.", soft_wrap=True
    )


def _with_journal(settings: EngineSettings, url: str) -> EngineSettings:
    """With what else the engine says of its journal."""
    others = settings.journal.model_dump() if settings.journal else {}
    return settings.model_copy(update={"journal": JournalSettings(**{**others, "url": url})})
