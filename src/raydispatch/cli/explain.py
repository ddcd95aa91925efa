"""`raydispatch explain`: who gets a message, and why."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.app import App, Json, load_engine
from raydispatch.routing.explain import Explanation


def explain(
    topic: Annotated[str, typer.Argument(help="The topic, such as dev.order.events.v1.")],
    app: App,
    message_type: Annotated[str | None, typer.Option("--type", help="The message type, such as OrderPlaced.")] = None,
    as_json: Json = False,
) -> None:
    """Tell which dispatchers get a message with this topic and type, and why the others do not."""
    explanation = load_engine(app).explain(topic, message_type)
    if as_json:
        print(json.dumps(_as_data(explanation), indent=2))
    else:
        _print(explanation, Console())


def _as_data(explanation: Explanation) -> dict[str, object]:
    return {
        **explanation._asdict(),
        "selected": [{"reason": reason, **route.model_dump(mode="json")} for route, reason in explanation.selected],
        "passed_over": [
            {"reason": reason, **route.model_dump(mode="json")} for route, reason in explanation.passed_over
        ],
        "similar": [route.model_dump(mode="json") for route in explanation.similar],
    }


def _print(explanation: Explanation, console: Console) -> None:
    kind = f" of type {explanation.message_type}" if explanation.message_type else ""
    category = explanation.category or "no category"
    console.print(f"[bold]{escape(explanation.topic)}[/bold]{escape(kind)} ({category})", highlight=False)
    if explanation.fault:
        console.print(f"[red]invalid message[/red]: {escape(explanation.fault)}", highlight=False)
    if explanation.selected or explanation.passed_over:
        console.print(_drawn(explanation))
    if not explanation.selected and not explanation.fault:
        console.print("[yellow]no dispatcher[/yellow] takes it", highlight=False)
    for route in explanation.similar:
        console.print(f"  did you mean {escape(route.topic_pattern)} ({escape(route.route_id)})?", highlight=False)


def _drawn(explanation: Explanation) -> Table:
    drawn = Table()
    for heading in ("", "dispatcher", "route", "pattern", "why"):
        drawn.add_column(heading)
    for runs, verdicts in ((True, explanation.selected), (False, explanation.passed_over)):
        for route, reason in verdicts:
            drawn.add_row(
                "[green]runs[/green]" if runs else "no",
                escape(route.dispatcher_id),
                escape(route.route_id),
                escape(route.topic_pattern),
                escape(reason),
                style=None if runs else "dim",
            )
    return drawn
