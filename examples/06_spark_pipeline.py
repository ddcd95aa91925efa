"""From raw files to a report, with Spark on Ray: read, clean, derive, deduplicate, route, and join what became of it.

    python examples/06_spark_pipeline.py [--rows 50000] [--out FOLDER]

Writes raw files of a shop with all the faults that raw files have, and leaves three things in the folder: the ledger,
the report as parquet, and one HTML page with plots.
"""

import argparse
import json
import random
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from raydispatch import DispatchEngine, Envelope, MessageCategory
from raydispatch.actors import DispatchSystem
from raydispatch.actors.connect import local_ray
from raydispatch.spark import spark_on_ray


class Order(BaseModel):
    order_id: str
    customer: str
    amount: float = Field(ge=0)
    currency: str


engine = DispatchEngine("night")


@engine.dispatcher("warehouse", topics="shop.*.order.events", category=MessageCategory.EVENT, batch=True)
def warehouse(orders: pa.Table) -> list[str] | None:
    """Gets whole Arrow tables: here, orders of nothing are left out."""
    amounts = pc.struct_field(orders["payload"], "amount")
    return ["skipped" if amount == 0 else "success" for amount in amounts.to_pylist()]


@engine.dispatcher("billing", topics="shop.*.order.events", category=MessageCategory.EVENT, replicas=2, breaker=None)
async def billing(envelope: Envelope[Order]) -> str:
    """Gets one order at a time, checked against the model; the bank does not know every currency."""
    if envelope.payload.currency not in ("EUR", "USD", "GBP"):
        raise LookupError(f"no bank takes {envelope.payload.currency}")
    return "shop.all.invoice.events"


@engine.dispatcher("archive", topics="shop.all.invoice.events", category=MessageCategory.EVENT)
async def archive(envelope: Envelope[Any]) -> None:
    """What billing sends on."""


def main() -> None:
    options = _options()
    out = options.out or Path(tempfile.mkdtemp(prefix="raydispatch-pipeline-"))
    write_raw_files(out / "raw", options.rows)
    with local_ray(num_cpus=4), DispatchSystem.start(engine) as system, spark_on_ray(system) as spark:
        orders = clean(read(spark, out / "raw")).cache()
        print(f"{options.rows:,} raw lines, {orders.count():,} orders after cleaning")
        system.dry_run(orders).show()
        report = system.route(orders, payload="order", message_id="order_id", ledger=out / "ledger")
        print("what became of them:", report.counts)
        print("in the ledger, each once:", f"{report.verify().recorded:,}")
        summaries = summarize(orders, report.ledger)
        for name, summary in summaries.items():
            summary.write.mode("overwrite").parquet(str(out / "report" / name))
        for row in summaries["errors"].collect():
            print(f"{row['count']:>8,} × {row['error']}")
        write_page(out / "report.html", summaries, report.counts)
    print("ledger, report and page:", options.out or "in a folder of the system's; --out names another one")


# Spark's part


def read(spark: Any, folder: Path) -> DataFrame:
    """Two sources that say the same in different words."""
    shops = spark.read.option("header", True).csv(str(folder / "shops.csv"))
    fields = "id string, at string, who string, total string, cur string, region string"
    web = spark.read.json(str(folder / "web.jsonl"), schema=fields)
    web = web.select(
        F.col("id").alias("order_id"), "at", F.col("who").alias("customer"), F.col("total").alias("amount"),
        F.col("cur").alias("currency"), "region",
    )  # fmt: skip
    return shops.unionByName(web)


def clean(raw: DataFrame) -> DataFrame:
    """Types, one spelling, topic and key; of several versions of an order, the latest."""
    typed = raw.select(
        F.trim("order_id").alias("order_id"),
        F.to_timestamp("at").alias("at"),
        F.trim("customer").alias("customer"),
        F.regexp_replace("amount", ",", ".").cast("double").alias("amount"),
        F.upper(F.trim("currency")).alias("currency"),
        F.lower(F.coalesce("region", F.lit("nowhere"))).alias("region"),
    ).where("order_id is not null and order_id != '' and at is not null")
    latest = Window.partitionBy("order_id").orderBy(F.desc("at"))
    unique = typed.withColumn("version", F.row_number().over(latest)).where("version = 1").drop("version")
    return unique.select(
        "*",
        F.concat_ws(".", F.lit("shop"), "region", F.lit("order"), F.lit("events")).alias("topic"),
        F.lit("Order").alias("message_type"),
        F.col("customer").alias("key"),
        F.struct("order_id", "customer", "amount", "currency").alias("order"),
    )


def summarize(orders: DataFrame, ledger: DataFrame) -> dict[str, DataFrame]:
    """What the ledger says, beside what the orders were."""
    joined = orders.select("order_id", "at", "region").join(ledger, F.col("order_id") == F.col("row_id"))
    each = joined.select(F.date_trunc("hour", "at").alias("hour"), F.explode("dispatchers").alias("one"))
    return {
        "hours": each.groupBy("hour", F.col("one.id").alias("dispatcher"), F.col("one.status").alias("status"))
        .count()
        .orderBy("hour", "dispatcher", "status"),
        "topics": joined.groupBy("topic")
        .agg(F.count("*").alias("rows"), F.expr("percentile_approx(duration_ms, 0.95)").alias("p95_ms"))
        .orderBy(F.desc("p95_ms")),
        "errors": joined.where("status not in ('success', 'skipped')")
        .groupBy("error_code", F.regexp_replace("error", r"\d+", "…").alias("error"))
        .count()
        .orderBy(F.desc("count")),
    }


# The page


def write_page(path: Path, summaries: dict[str, DataFrame], counts: dict[str, int]) -> None:
    rows = {name: summary.limit(500).collect() for name, summary in summaries.items()}
    hours: dict[str, int] = {}
    for row in rows["hours"]:
        hour = f"{row['hour']:%H}:00"
        hours[hour] = hours.get(hour, 0) + row["count"]
    errors = {f"{row['error_code']}: {row['error']}"[:70]: row["count"] for row in rows["errors"]}
    slowest = {row["topic"]: round(row["p95_ms"], 2) for row in rows["topics"][:10]}
    path.write_text(
        "<!doctype html><meta charset='utf-8'><title>Orders of a night</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;color-scheme:light dark}</style>"
        "<h1>Orders of a night</h1>"
        + plot("How they ended", counts, "rows")
        + plot("Handled, by hour", dict(sorted(hours.items())), "calls of a dispatcher")
        + plot("Slowest topics", slowest, "ms, 95th percentile")
        + plot("Error classes", errors, "rows"),
        encoding="utf-8",
    )


def plot(title: str, values: dict[str, Any], unit: str) -> str:
    """Bars, as SVG in the page."""
    most = max([*values.values(), 1e-9])
    bars = "".join(
        f"<text x='290' y='{22 * n + 15}' text-anchor='end'>{escape(str(name))}</text>"
        f"<rect x='300' y='{22 * n + 3}' width='{max(1.0, 380 * value / most):.1f}' height='15' fill='#1f6feb'/>"
        f"<text x='{310 + 380 * value / most:.1f}' y='{22 * n + 15}'>{value:,}</text>"
        for n, (name, value) in enumerate(values.items())
    )
    height = 22 * len(values) + 8
    return (
        f"<h2>{escape(title)}</h2>"
        f"<svg viewBox='0 0 800 {height}' width='100%' font-size='12' fill='currentColor'>{bars}</svg>"
        f"<p>{escape(unit)}</p>"
    )


# The raw files


def write_raw_files(folder: Path, rows: int) -> None:
    """Orders of one night, with missing ids and dates, commas for points, several versions, unknown currencies."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(7)
    regions = ["north", "south", "EAST", "west"]
    with (folder / "shops.csv").open("w") as shops, (folder / "web.jsonl").open("w") as web:
        shops.write("order_id,at,customer,amount,currency,region\n")
        for number in range(rows):
            order_id = f"o-{number if chance.random() > 0.02 else chance.randrange(number + 1)}"
            at = f"2026-03-01 {chance.randrange(24):02}:{chance.randrange(60):02}:{chance.randrange(60):02}"
            amount = f"{chance.choice([0, -5, *range(1, 200)])}.{chance.randrange(100):02}"
            currency = chance.choice(
                ["EUR", " eur", "USD", "GBP", "EUR", "XXX"] if number % 50 == 0 else ["EUR", "usd"]
            )
            region, customer = chance.choice(regions), f"c-{chance.randrange(rows // 10 + 1)}"
            if number % 2:
                line = [order_id, at, customer, f'"{amount.replace(".", ",")}"', currency, region]
                shops.write(",".join(line if number % 97 else ["", *line[1:]]) + "\n")
            elif number % 101 == 0:
                web.write('{"id": "broken\n')
            else:
                named = {"id": order_id, "at": at, "who": customer, "total": amount, "cur": currency, "region": region}
                web.write(json.dumps(named) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, help="raw lines to begin with")
    parser.add_argument("--out", type=Path, help="a folder for everything; a new one under the system's, if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
