"""A DataFrame as messages: which column is what, and what is wrong with it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql import types as T  # noqa: N812 - as everybody calls it

from raydispatch.errors import InvalidParameter

ColumnLike: TypeAlias = "str | Column | None"
"""A column by name, or an expression."""

ALL_OTHERS = "*"
"""As a payload: a struct of all columns that are nothing else."""

__all__ = [
    "ALL_OTHERS",
    "ONLY",
    "ColumnLike",
    "Columns",
    "DataFrame",
    "key_frame",
    "message_frame",
    "message_id_column",
]

ONLY = "_raydispatch_only"
"""The column that says which dispatchers a row is for, when it is sent again."""

_TEXT = (T.StringType, T.VarcharType, T.CharType)
_PAYLOADS = (*_TEXT, T.BinaryType, T.StructType, T.MapType)


class Columns(NamedTuple):
    """Which column of a DataFrame is what. None: the one of that name, if there is one."""

    topic: ColumnLike = None
    message_type: ColumnLike = None
    payload: ColumnLike = None
    key: ColumnLike = None
    correlation_id: ColumnLike = None
    message_id: ColumnLike = None
    traceparent: ColumnLike = None


def message_frame(df: DataFrame, columns: Columns, job_id: str, only: Column | None = None) -> DataFrame:
    """The columns that are sent, and two hashes that make the message ids."""
    if df.isStreaming:
        raise InvalidParameter("This DataFrame is a stream: route_stream(df, checkpoint=…) routes it.")
    found = {name: _column(df, name, wanted) for name, wanted in columns._asdict().items()}
    if found["topic"] is None:
        raise InvalidParameter(_missing(df, "topic"))
    if columns.payload is None and found["payload"] is None:
        raise InvalidParameter(f'{_missing(df, "payload")} payload="*" takes all other columns.')
    if isinstance(columns.payload, str) and columns.payload == ALL_OTHERS:
        found["payload"] = _others(df, columns)
    chosen = [column.alias(name) for name, column in found.items() if column is not None]
    frame = df.select(*chosen, *([only.alias("only")] if only is not None else []))
    frame = _typed(frame)
    return frame.select(*_sent(frame), *_hashes(frame, job_id))


def key_frame(df: DataFrame, columns: Columns) -> DataFrame:
    """Topic and message type only: what a route is chosen by."""
    topic, message_type = _column(df, "topic", columns.topic), _column(df, "message_type", columns.message_type)
    if topic is None:
        raise InvalidParameter(_missing(df, "topic"))
    nothing = F.lit(None).cast("string")
    frame = df.select(topic.alias("topic"), (nothing if message_type is None else message_type).alias("message_type"))
    return _typed(frame)


def message_id_column(df: DataFrame, columns: Columns) -> Column:
    """The rows' own ids, as text: what a ledger has as its row ids."""
    column = _column(df, "message_id", columns.message_id)
    if column is None:
        raise InvalidParameter(
            "resume needs a message_id column, to know the rows of the ledger again: name one with message_id=…"
        )
    return column.cast("string")


def _column(df: DataFrame, name: str, wanted: ColumnLike) -> Column | None:
    if isinstance(wanted, Column):
        return wanted
    if wanted is None:
        return df[f"`{name}`"] if name in df.columns else None
    if not isinstance(wanted, str):
        raise InvalidParameter(f"{name} must be the name of a column or an expression, not {type(wanted).__name__}.")
    if name == "payload" and wanted == ALL_OTHERS:
        return None
    if wanted.split(".")[0] not in df.columns and wanted not in df.columns:
        raise InvalidParameter(_missing(df, wanted, f"for {name}"))
    return df[f"`{wanted}`"] if wanted in df.columns else df[wanted]


def _missing(df: DataFrame, name: str, what: str = "") -> str:
    has = ", ".join(df.columns) or "no columns"
    return f"The DataFrame has no column '{name}'{' ' if what else ''}{what}; it has {has}. Name another one."


def _others(df: DataFrame, columns: Columns) -> Column:
    used = {wanted if isinstance(wanted, str) else name for name, wanted in columns._asdict().items()}
    rest = [name for name in df.columns if name not in used - {ALL_OTHERS} and name != ONLY]
    if not rest:
        raise InvalidParameter("There are no other columns that could be the payload.")
    return F.struct(*(df[f"`{name}`"] for name in rest))


def _typed(frame: DataFrame) -> DataFrame:
    """Text where text is needed; what cannot be a topic or a payload is said so."""
    columns = []
    for field in frame.schema.fields:
        column = F.col(field.name)
        if field.name in ("topic", "message_type", "traceparent") and not isinstance(
            field.dataType, (*_TEXT, T.NullType)
        ):
            raise InvalidParameter(
                f"The column for {field.name} is {field.dataType.simpleString()}; it must be a string: cast it, or "
                "name another one."
            )
        if field.name == "payload" and not isinstance(field.dataType, _PAYLOADS):
            raise InvalidParameter(
                f"The payload is {field.dataType.simpleString()}; it must be a string, binary, a struct or a map. "
                'payload="*" takes all other columns.'
            )
        column = F.col(field.name)
        columns.append(column if field.name == "payload" else column.cast("string").alias(field.name))
    return frame.select(*columns)


def _sent(frame: DataFrame) -> Sequence[Column]:
    return [F.col(name).alias("row_id" if name == "message_id" else name) for name in frame.columns]


def _hashes(frame: DataFrame, job_id: str) -> list[Column]:
    """Of the job and the rows' own ids; or, without those, of the partition and all that is sent."""
    if "message_id" in frame.columns:
        parts: list[Any] = [F.lit(job_id), F.col("message_id")]
    else:
        parts = [F.lit(job_id), F.spark_partition_id()]
        fields = [field for field in frame.schema.fields if field.name != "only"]
        # Spark leaves nulls out: where they stand must count, too.
        parts += [part for field in fields for part in (F.isnull(field.name), _hashable(field))]
    # Two seeds make 128 bits: a clash among ten million rows is then as likely as among none.
    return [F.xxhash64(F.lit(seed), *parts).alias(f"hash_{seed}") for seed in (1, 2)]


def _hashable(field: T.StructField) -> Column:
    # Spark refuses to hash maps, and leaves out nulls, at any depth.
    is_nested = isinstance(field.dataType, (T.StructType, T.MapType))
    return F.to_json(field.name) if is_nested else F.col(field.name)
