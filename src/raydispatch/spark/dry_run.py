"""A dry run: where the rows of a DataFrame would go, by a table or by two. Nothing is sent."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """What would happen, by distinct topic and message type.

    Example: `system.dry_run(df, against=new_engine).show()`.
    """

    def __init__(self, spark: Any, keys: Sequence[Mapping[str, Any]], has_other: bool) -> None:
        self._spark = spark
        self._keys = keys
        self._has_other = has_other
        self.counts = _summed((row["status"], row["rows"]) for row in keys)
        """Rows by what would become of them: `routed`, `no_dispatcher`, `invalid_message`."""
        self.routes = _summed((name, row["rows"]) for row in keys for name in row["routes"])
        """Rows by route; a row counts for each route that leads it to a dispatcher."""
        self.dispatchers = _summed((name, row["rows"]) for row in keys for name in row["dispatchers"])
        """Rows by dispatcher."""

    @property
    def keys(self) -> DataFrame:
        """Topic, message type, rows, status, routes and dispatchers; and those of the other table, if there is one."""
        return self._frame(self._keys)

    @property
    def unmatched(self) -> DataFrame:
        """Topics and types that nobody takes."""
        return self._frame(self._unmatched()).select("topic", "message_type", "rows", "status")

    @property
    def changed(self) -> DataFrame:
        """Topics and types that the other table sends to other dispatchers."""
        if not self._has_other:
            raise InvalidParameter("There is no other table to compare with: dry_run(df, against=engine) takes one.")
        return self._frame(self._changed()).drop("status")

    def show(self, most: int = 20) -> None:
        """Print a summary."""
        print(self.text(most))

    def text(self, most: int = 20) -> str:
        """A summary: counts, dispatchers, what nobody takes, and what would change."""
        lines = [f"{sum(self.counts.values()):,} rows, nothing sent"]
        lines += [f"  {status:<18}{count:>14,}" for status, count in self.counts.items()]
        lines += ["by dispatcher", *(f"  {name:<18}{count:>14,}" for name, count in self.dispatchers.items())]
        lines += _listed("nobody takes", self._unmatched(), most, _key)
        if self._has_other:
            lines += _listed("the other table changes", self._changed(), most, _change)
        return "\n".join(lines)

    def _unmatched(self) -> list[Mapping[str, Any]]:
        return [row for row in self._keys if row["status"] != "routed"]

    def _changed(self) -> list[Mapping[str, Any]]:
        return [row for row in self._keys if sorted(row["dispatchers"]) != sorted(row["other_dispatchers"])]

    def _frame(self, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
        return self._spark.createDataFrame([tuple(row[name] for name in _SCHEMA.names) for row in rows], _DDL)


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
    # One task: what is left after grouping is small, and a Python worker takes longer to start than to match it.
    matched = grouped.coalesce(1).mapInArrow(_matching(table, other), _DDL)
    keys = [row.asDict() for row in matched.collect()]
    return DryRun(df.sparkSession, keys, other is not None)


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


def _summed(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, rows in counts:
        found[name] += rows
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def _listed(
    title: str, rows: Sequence[Mapping[str, Any]], most: int, line: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    if not rows:
        return [f"{title}: nothing"]
    shown = sorted(rows, key=lambda row: (-row["rows"], row["topic"] or ""))[:most]
    more = [f"  … and {len(rows) - most:,} others"] if len(rows) > most else []
    return [title, *(f"  {row['rows']:>10,}  {line(row)}" for row in shown), *more]


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['topic']} ({row['message_type']})"


def _change(row: Mapping[str, Any]) -> str:
    return f"{_key(row)}: {_names(row['dispatchers'])} → {_names(row['other_dispatchers'])}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"
