"""`raydispatch`: the commands, and how their errors are shown."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch import __version__
from raydispatch.cli.dead_letters import dead_letters
from raydispatch.cli.demo.command import demo
from raydispatch.cli.deploy import deploy
from raydispatch.cli.down import down
from raydispatch.cli.explain import explain
from raydispatch.cli.lint import lint
from raydispatch.cli.routes import routes
from raydispatch.cli.scale import scale
from raydispatch.cli.status import status
from raydispatch.cli.submit import submit
from raydispatch.cli.top import top
from raydispatch.errors import DispatchError

app = typer.Typer(
    help="Look at a dispatch engine, and run it on a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
for command in (routes, explain, lint):
    app.command(rich_help_panel="An engine: what would happen")(command)
for on_ray in (deploy, submit, status, top, scale, down):
    app.command(rich_help_panel="A system on Ray: what happens")(on_ray)
app.add_typer(dead_letters, name="dead-letters", rich_help_panel="A system on Ray: what happens")


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True)) -> None:
    """Options of all commands."""


def main() -> None:
    """Run a command; an error of ours is a sentence on stderr and exit code 2."""
    try:
        app()
    except DispatchError as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
