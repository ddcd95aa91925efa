"""`raydispatch lint`: what is allowed, and yet most likely not meant."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.app import App, Json, load_engine
from raydispatch.routing.lint import LintLevel


def lint(
    app: App,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail too.")] = False,
    as_json: Json = False,
) -> None:
    """Look for unreachable, shadowed and overlapping routes, and for dispatchers without any. Exit code 1 on errors."""
    findings = load_engine(app).lint()
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    elif not findings:
        Console().print("[green]nothing found[/green]")
    else:
        drawn = Table()
        for heading in ("level", "rule", "subject", "what"):
            drawn.add_column(heading)
        for finding in findings:
            colour = "red" if finding.level is LintLevel.ERROR else "yellow"
            drawn.add_row(
                f"[{colour}]{finding.level}[/{colour}]", finding.rule, escape(finding.subject), escape(finding.message)
            )
        Console().print(drawn)
    if any(strict or finding.level is LintLevel.ERROR for finding in findings):
        raise typer.Exit(1)
