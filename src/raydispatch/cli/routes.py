"""`raydispatch routes`: the table, in the order in which matches stand."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.app import App, Json, load_engine
from raydispatch.routing.table import RouteTable


def routes(app: App, as_json: Json = False) -> None:
    """Show all routes, in order."""
    table = load_engine(app).table
    if as_json:
        content = {"version": table.version, "routes": [route.model_dump(mode="json") for route in table.routes]}
        print(json.dumps(content, indent=2))
        return
    Console().print(_drawn(table))


def _drawn(table: RouteTable) -> Table:
    drawn = Table(title=f"{len(table)} routes, table {table.version}", title_justify="left")
    for heading in ("route", "priority", "category", "pattern", "type", "dispatcher", ""):
        drawn.add_column(heading, justify="right" if heading == "priority" else "left")
    for route in table.routes:
        types = table.types_of(route)
        drawn.add_row(
            escape(route.route_id),
            str(route.priority),
            route.message_category,
            escape(route.topic_pattern),
            "any" if types is None else escape(", ".join(sorted(types)) or "none"),
            escape(route.dispatcher_id),
            "" if route.enabled else "disabled",
            style=None if route.enabled else "dim",
        )
    return drawn
