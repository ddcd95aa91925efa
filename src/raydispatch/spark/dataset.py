"""Ray Datasets: the same shipments and the same ledger, sent by Ray Data's tasks instead of Spark's workers."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import ray
from pydantic_core import to_json
from ray.data.dataset import MaterializedDataset

from raydispatch.errors import InvalidParameter
from raydispatch.spark.ids import Occurrences
from raydispatch.spark.ledger import LEDGER, LEDGER_FORMAT
from raydispatch.spark.progress import OnProgress, told
from raydispatch.spark.push import Order, push
from raydispatch.spark.report import ABOUT, RouteReport
from raydispatch.spark.routing import HOLD_SECONDS, OnOpen, Target, check_on_open
from raydispatch.spark.session import BATCH_ROWS

Names: TypeAlias = Mapping[str, str]
"""Which column is what: by our name, the Dataset's."""

ALL_OTHERS = "*"
_TEXTS = ("topic", "message_type", "key", "correlation_id", "message_id", "traceparent")


def route_dataset(
    target: Target,
    ds: Any,
    columns: Mapping[str, str | None],
    *,
    ledger: "str | Path | None" = None,
    job_id: str | None = None,
    on_open: OnOpen = "refuse",
    on_progress: OnProgress | None = None,
) -> RouteReport:
    """Send every row, and wait; see `DispatchSystem.route_dataset`."""
    if not isinstance(ds, ray.data.Dataset):
        raise InvalidParameter(f"route_dataset takes a Ray Dataset, not {type(ds).__name__}.")
    check_on_open(on_open)
    names = _found(ds.schema(), columns)
    job = job_id or uuid4().hex
    folder = Path(ledger) if ledger is not None else Path(tempfile.gettempdir()) / "raydispatch-ledgers" / uuid4().hex
    if any(folder.glob("*.parquet")):
        raise InvalidParameter(f"There is a ledger in {folder} already: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": LEDGER_FORMAT, "job_id": job, "system": target.name}
    (folder / ABOUT).write_text(json.dumps(about))
    order = Order(
        target.name, ray.get_runtime_context().gcs_address, target.settings, target.max_payload_bytes,
        HOLD_SECONDS if on_open == "wait" else 0.0, job_id is not None, job if on_progress else None,
    )  # fmt: skip
    # Only of one that is materialized is that free; of others, counting would read the input twice.
    submitted = ds.count() if isinstance(ds, MaterializedDataset) else None
    started = perf_counter()
    with told(job, target.ask, on_progress):
        sent = ds.map_batches(_Sending(order, names, job).send, batch_format="pyarrow", batch_size=BATCH_ROWS)
        sent.write_parquet(str(folder))
    return RouteReport(None, str(folder), job, submitted, perf_counter() - started, "message_id" not in names)


class _Sending:
    """Sends a batch, in a task of Ray Data."""

    def __init__(self, order: Order, names: Names, job: str) -> None:
        self._order = order
        self._names = names
        self._job = job

    def send(self, table: pa.Table) -> pa.Table:
        """The ledger of a batch."""
        task, occurrences = _task()
        batch = _messages(table, self._names, self._job, task)
        return pa.Table.from_batches(push(self._order, iter([batch]), occurrences=occurrences), LEDGER)


def _task() -> tuple[int, Occurrences]:
    """The number of this task, and what it has seen of equal rows so far. If it runs again, the number is the same."""
    from ray.data._internal.execution.interfaces import TaskContext

    context = TaskContext.get_current()
    if context is None:
        return 0, Occurrences()
    return context.task_idx, context.kwargs.setdefault("raydispatch", Occurrences())


def _found(schema: Any, columns: Mapping[str, str | None]) -> dict[str, str]:
    there = list(schema.names) if schema is not None else []
    names = {}
    for name, wanted in columns.items():
        if wanted is None and name in there:
            names[name] = name
        elif wanted is not None and (wanted in there or (name == "payload" and wanted == ALL_OTHERS)):
            names[name] = wanted
        elif wanted is not None or name in ("topic", "payload"):
            hint = ' payload="*" takes all other columns.' if name == "payload" else ""
            raise InvalidParameter(
                f"The Dataset has no column '{wanted or name}' for {name}; it has {', '.join(there) or 'none'}.{hint}"
            )
    if names["payload"] == ALL_OTHERS and set(there) <= set(names.values()):
        raise InvalidParameter("There are no other columns that could be the payload.")
    return names


def _messages(table: pa.Table, names: Names, job: str, task: int) -> pa.RecordBatch:
    columns = {name: table[source].combine_chunks() for name, source in names.items() if source != ALL_OTHERS}
    for name in _TEXTS:
        if name in columns and not pa.types.is_string(columns[name].type):
            columns[name] = _text(name, columns[name])
    if names["payload"] == ALL_OTHERS:
        rest = [name for name in table.column_names if name not in names.values()]
        columns["payload"] = pa.StructArray.from_arrays([table[name].combine_chunks() for name in rest], names=rest)
    if "message_id" in columns:
        columns["row_id"] = columns.pop("message_id")
        hashed = [columns["row_id"]]
        salt = job
    else:
        hashed = list(columns.values())
        salt = f"{job}-{task}"
    for seed in (1, 2):
        columns[f"hash_{seed}"] = pa.array(_hashed(hashed, f"{seed}-{salt}", table.num_rows).view(np.int64))
    return pa.RecordBatch.from_pydict(columns)


def _text(name: str, column: pa.Array) -> pa.Array:
    if name in ("topic", "message_type") and not (
        pa.types.is_large_string(column.type) or pa.types.is_null(column.type) or pa.types.is_dictionary(column.type)
    ):
        raise InvalidParameter(f"The column for {name} is {column.type}; it must be a string.")
    return pc.cast(column, pa.string())


def _hashed(columns: list[pa.Array], salt: str, count: int) -> npt.NDArray[np.uint64]:
    key = hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()
    total: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
    for column in columns:
        values = column.to_pylist()
        if pa.types.is_nested(column.type):
            values = [to_json(value, inf_nan_mode="constants") for value in values]
        texts = np.array([value if isinstance(value, str) else repr(value) for value in values], object)
        total = total * np.uint64(31) + pd.util.hash_array(texts, hash_key=key, categorize=False)
    return total
