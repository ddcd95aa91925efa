"""A dry run: where the rows of a DataFrame would go, by a table or by two. Nothing is sent."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from raydispatch.bus.engine import DispatchEngine
from raydispatch.errors import InvalidParameter
from raydispatch.messages.topic import category_of
from raydispatch.routing.table import RouteTable
from raydispatch.spark.frame import Columns, key_frame

_ROUTES = pa.list_(pa.string())
_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("message_type", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("status", pa.string()),
        pa.field("routes", _ROUTES),
        pa.field("dispatchers", _ROUTES),
        pa.field("other_routes", _ROUTES),
        pa.field("other_dispatchers", _ROUTES),
    ]
)
_DDL = (
    "topic string, message_type string, rows bigint, status string, routes array<string>, dispatchers array<string>, "
    "other_routes array<string>, other_dispatchers array<string>"
)


class DryRun:
    """What would happen. `keys` has a row for each distinct topic and message type.

    Example: `system.dry_run(df, against=new_engine).changed.show()`.
    """

    def __init__(self, keys: DataFrame, has_other: bool) -> None:
        self._keys = keys
        self._has_other = has_other

    @cached_property
    def keys(self) -> DataFrame:
        """Topic, message type, number of rows, status (`routed`, `no_dispatcher`, `invalid_message`), routes and
        dispatchers; and those of the other table, if there is one."""
        # Kept by Spark, so that the input is read once, whatever is asked.
        return self._keys.cache()

    @cached_property
    def counts(self) -> dict[str, int]:
        """Rows by what would become of them."""
        return self._summed("status")

    @cached_property
    def routes(self) -> dict[str, int]:
        """Rows by route; a row counts for each route that leads it to a dispatcher."""
        return self._exploded("routes")

    @cached_property
    def dispatchers(self) -> dict[str, int]:
        """Rows by dispatcher."""
        return self._exploded("dispatchers")

    @property
    def unmatched(self) -> DataFrame:
        """Topics and types that nobody takes."""
        return self.keys.where(F.col("status") != "routed").select("topic", "message_type", "rows", "status")

    @property
    def changed(self) -> DataFrame:
        """Topics and types that the other table sends to other dispatchers."""
        if not self._has_other:
            raise InvalidParameter("There is no other table to compare with: dry_run(df, against=engine) takes one.")
        return self.keys.where(F.array_sort("dispatchers") != F.array_sort("other_dispatchers")).drop("status")

    def show(self, most: int = 20) -> None:
        """Print a summary."""
        print(self.text(most))

    def text(self, most: int = 20) -> str:
        """A summary: counts, dispatchers, what nobody takes, and what would change."""
        lines = [f"{sum(self.counts.values()):,} rows, nothing sent"]
        lines += [f"  {status:<18}{count:>14,}" for status, count in self.counts.items()]
        lines += ["by dispatcher", *(f"  {name:<18}{count:>14,}" for name, count in self.dispatchers.items())]
        lines += _listed("nobody takes", self.unmatched, most, lambda row: f"{row['topic']} ({row['message_type']})")
        if self._has_other:
            lines += _listed(
                "the other table changes",
                self.changed,
                most,
                lambda row: (
                    f"{row['topic']} ({row['message_type']}): {_names(row['dispatchers'])} → "
                    f"{_names(row['other_dispatchers'])}"
                ),
            )
        return "\n".join(lines)

    def _summed(self, column: str) -> dict[str, int]:
        rows = self.keys.groupBy(column).agg(F.sum("rows").alias("rows")).orderBy(F.desc("rows")).collect()
        return {row[column]: row["rows"] for row in rows}

    def _exploded(self, column: str) -> dict[str, int]:
        exploded = self.keys.select(F.explode(column).alias("name"), "rows")
        rows = exploded.groupBy("name").agg(F.sum("rows").alias("rows")).orderBy(F.desc("rows"), "name").collect()
        return {row["name"]: row["rows"] for row in rows}


def dry_run(
    table: RouteTable, df: DataFrame, columns: Columns, against: "DispatchEngine | RouteTable | None" = None
) -> DryRun:
    """Match the distinct keys of a DataFrame, inside Spark."""
    if not isinstance(df, DataFrame):
        raise InvalidParameter(f"dry_run takes a Spark DataFrame, not {type(df).__name__}.")
    other = against.freeze() if isinstance(against, DispatchEngine) else against
    if other is not None and not isinstance(other, RouteTable):
        raise InvalidParameter(f"against takes an engine or a table, not {type(other).__name__}.")
    grouped = key_frame(df, columns).groupBy("topic", "message_type").agg(F.count(F.lit(1)).alias("rows"))
    return DryRun(grouped.mapInArrow(_matching(table, other), _DDL), other is not None)


def _matching(
    table: RouteTable, other: RouteTable | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def matching(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [
                {**row, **_matched(table, row, ""), **(_matched(other, row, "other_") if other else {})}
                for row in batch.to_pylist()
            ]
            yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)

    return matching


def _matched(table: RouteTable, row: dict[str, Any], prefix: str) -> dict[str, Any]:
    topic, message_type = row["topic"], row["message_type"]
    category = category_of(topic) if topic else None
    routes = table.select(topic, category, message_type or "") if category is not None else ()
    status = "invalid_message" if category is None else "routed" if routes else "no_dispatcher"
    return {
        **({} if prefix else {"status": status}),
        f"{prefix}routes": [route.route_id for route in routes],
        f"{prefix}dispatchers": [route.dispatcher_id for route in routes],
    }


def _listed(title: str, rows: DataFrame, most: int, line: Callable[[Any], str]) -> list[str]:
    found = rows.orderBy(F.desc("rows"), "topic").limit(most + 1).collect()
    if not found:
        return [f"{title}: nothing"]
    more = [f"  … and more than {most} others"] if len(found) > most else []
    return [title, *(f"  {row['rows']:>10,}  {line(row)}" for row in found[:most]), *more]


def _names(names: list[str]) -> str:
    return ", ".join(names) or "nobody"
