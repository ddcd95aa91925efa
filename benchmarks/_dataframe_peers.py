"""What the DataFrame way is measured against: the limit that Spark sets, Ray Data, and Spark alone."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydispatch.messages.topic import category_of
from raydispatch.routing.table import RouteTable
from raydispatch.spark.ids import binary_of, ids_of, text_of
from raydispatch.spark.ledger import DISPATCHER, LEDGER


def constant_ledger(count: int) -> pa.RecordBatch:
    """A ledger of so many rows that succeeded, with ids that are all different, as in a real one."""
    numbers = np.arange(2 * count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ids = text_of(binary_of(numbers.reshape(count, 2)))
    topics = pa.array([f"dev.area-{number}.events.v1" for number in range(1_000)])
    return _ledger(ids, topics.take(pa.array(np.arange(count) % 1_000)), "orders", count)


def yielding_constants(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The limit: Spark's way to Python and back, and its writing."""
    made: dict[int, pa.RecordBatch] = {}
    for batch in batches:
        if batch.num_rows not in made:
            made[batch.num_rows] = constant_ledger(batch.num_rows)
        yield made[batch.num_rows]


class Matching:
    """For Ray Data: match the distinct topics, work on the rows, write down what became of them."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def __call__(self, table: pa.Table) -> pa.Table:
        topics = pc.dictionary_encode(table["topic"].combine_chunks())
        for topic in topics.dictionary.to_pylist():
            category = category_of(topic)
            assert category is not None
            assert self._table.select(topic, category, "Order")
        orders(table)
        count = table.num_rows
        ids = text_of(binary_of(ids_of(table["hash_1"].combine_chunks(), table["hash_2"].combine_chunks())))
        return pa.Table.from_batches([_ledger(ids, table["topic"].combine_chunks(), "orders", count)])


def orders(table: pa.Table) -> None:
    """The batch handler of every peer."""
    pc.sum(pc.binary_length(table["payload"]))


def by_regexes(patterns: list[str]) -> Any:
    """Spark alone: every row against all compiled regexes, since a message goes to every route that takes it."""

    def matching(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd

        compiled = [re.compile(pattern, re.IGNORECASE).fullmatch for pattern in patterns]
        for frame in frames:
            found = [[number for number, matches in enumerate(compiled) if matches(topic)] for topic in frame["topic"]]
            yield pd.DataFrame({"topic": frame["topic"], "routes": found, "size": frame["payload"].str.len()})

    return matching


def _ledger(ids: pa.Array, topics: pa.Array, dispatcher_id: str, count: int) -> pa.RecordBatch:
    def same(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    entries = [same(dispatcher_id, pa.string()), same("success", pa.string()), same(1, pa.int32())]
    dispatchers = pa.StructArray.from_arrays([*entries, pa.nulls(count, pa.string())], fields=list(DISPATCHER))
    offsets, nowhere = np.arange(count + 1, dtype=np.int32), np.zeros(count + 1, np.int32)
    nothing = pa.nulls(count, pa.string())
    columns = [
        ids, topics, same("Order", pa.string()), same("success", pa.string()),
        pa.ListArray.from_arrays(pa.array(offsets), dispatchers),
        pa.ListArray.from_arrays(pa.array(nowhere), pa.array([], pa.string())),
        nothing, nothing, same(1, pa.int32()), same(1.5, pa.float64()), ids, nothing,
        same("0123456789abcdef", pa.string()),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=LEDGER)
