"""The last part of the demo: a DataFrame of orders through Spark, and the ledger of its rows."""

from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.bar import Rows, bar, colour
from raydispatch.cli.demo.screen import Screen
from raydispatch.cli.demo.shop import build_night_shop
from raydispatch.cli.source import has_spark
from raydispatch.cli.summary import counted
from raydispatch.errors import LedgerUnbalanced, MissingExtra

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem
    from raydispatch.spark.report import RouteReport

ORDERS = 200_000
FAULTY = "order-1"
"""One of those without a number."""


def route_orders(screen: Screen, console: Console, system: "DispatchSystem") -> bool:
    """Whether every row has its entry; without Spark there are none, and that is right, too."""
    if not has_spark():
        screen.heading("4. A DataFrame", f"Left out. {escape(str(MissingExtra('Spark on Ray', 'spark')))}")
        return True
    screen.heading(
        "4. A DataFrame",
        f"At night come the {ORDERS:,} orders of the day, from Spark, whose workers run on the same Ray. Billing and",
        "audit take tables then: the shop moves to other handlers, without a pause. Some orders have no number.",
    )
    system.swap(build_night_shop())
    screen.say("the shop has its handlers for the night")
    from raydispatch.spark import spark_on_ray
    from raydispatch.spark.progress import interruptible

    with spark_on_ray() as spark, TemporaryDirectory(prefix="raydispatch-demo-", ignore_cleanup_errors=True) as folder:
        screen.say("Spark is there")
        work = partial(_route, screen, console, system, spark, folder)
        return interruptible(work, spark.sparkContext.cancelAllJobs)


def _route(screen: Screen, console: Console, system: "DispatchSystem", spark: Any, folder: str) -> bool:
    with bar(console, Rows(), ORDERS) as tell:
        report = system.route(_orders(spark), ledger=folder, on_progress=tell)
    seconds = report.seconds or 1.0
    screen.say(f"{ORDERS:,} orders done in {seconds:.1f} s, [green]{ORDERS / seconds:,.0f} a second[/green]")
    screen.heading("The ledger of the DataFrame", "A row for each order, in parquet. How they ended:")
    console.print(counted(report.counts))
    screen.heading("Some of its rows")
    console.print(_some_rows(report))
    screen.heading("And one of them in words")
    console.print(report.explain(FAULTY), markup=False, highlight=False, soft_wrap=True)
    return _adds_up(console, report)


def _orders(spark: Any) -> Any:
    """Mostly as they should be; one in fifty has no number, and one in a thousand is for nobody."""
    return spark.range(ORDERS).selectExpr(
        "concat('order-', id) AS message_id",
        "if(id % 1000 = 2, 'dev.stock.commands.count', 'dev.order.events.v1') AS topic",
        "'OrderPlaced' AS message_type",
        "named_struct('order_id', if(id % 50 = 1, null, id), 'total', 9.99D) AS payload",
    )


def _some_rows(report: "RouteReport") -> Table:
    table = Table()
    for heading in ("row", "topic", "status", "error"):
        table.add_column(heading, no_wrap=heading != "error")
    rows = report.ledger.where("row_id IN ('order-0', 'order-1', 'order-2', 'order-3')").orderBy("row_id").collect()
    for row in rows:
        status = f"[{colour(row['status'])}]{row['status']}[/]"
        table.add_row(row["row_id"], row["topic"], status, escape(row["error"] or ""))
    return table


def _adds_up(console: Console, report: "RouteReport") -> bool:
    try:
        balance = report.verify()
    except LedgerUnbalanced as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        return False
    console.print(
        f"{balance.submitted:,} rows read by Spark, {balance.recorded:,} in the ledger, {balance.distinct:,} row ids: "
        "[green]every row has its entry[/green].",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return balance.recorded == balance.distinct == ORDERS
