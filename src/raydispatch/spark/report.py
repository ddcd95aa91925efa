"""The report of a job: its ledger, and what can be asked of it."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from raydispatch.errors import InvalidParameter, LedgerUnbalanced
from raydispatch.spark.ledger import LEDGER_FORMAT
from raydispatch.spark.reading import DONE, ArrowReader, LedgerReader, SparkReader

ABOUT = "_raydispatch.json"
"""The file beside a ledger that says whose it is."""


class Balance(NamedTuple):
    """What `verify` has found to agree."""

    submitted: int
    """Rows that were read, as Spark counted them itself; those of the ledger, where nobody counted."""
    recorded: int
    """Rows of the ledger."""
    distinct: int
    """Row ids of the ledger."""
    counts: dict[str, int]


class RouteReport:
    """What became of a job. The ledger is a parquet folder: reading it, as often as you like, sends nothing.

    Example: `report.counts == {"success": 9_990, "invalid_message": 10}`.
    """

    def __init__(
        self,
        spark: Any,
        path: str,
        job_id: str,
        submitted: int | None = None,
        seconds: float | None = None,
        is_unique: bool = False,
    ) -> None:
        self._reader: LedgerReader = ArrowReader(path) if spark is None else SparkReader(spark, path)
        self.path = path
        """Where the ledger is."""
        self.job_id = job_id
        self.submitted = submitted
        """Rows that were read; None if nobody counted them, as of a ledger that was opened later."""
        self.seconds = seconds
        """How long the job took."""
        self._is_unique = is_unique
        """Whether no two rows may share an id: those that rows bring along may be the same."""

    @classmethod
    def open(cls, spark: Any, path: "str | Path") -> "RouteReport":
        """A ledger that was written before, by this process or another one, even if that one died meanwhile.

        Without Spark (None), one on this machine.
        """
        place, about = _about(spark, str(path))
        if about is None:
            raise InvalidParameter(f"There is no ledger in {place}.")
        if about["format"] != LEDGER_FORMAT:
            raise InvalidParameter(f"The ledger in {place} has format {about['format']}, not {LEDGER_FORMAT}.")
        return cls(spark, place, about["job_id"])

    @property
    def ledger(self) -> Any:
        """One row for each row submitted: a Spark DataFrame; of a job over a Ray Dataset, a Dataset."""
        return self._reader.frame

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows ended how, the most frequent first."""
        return dict(sorted(self._reader.counts().items(), key=lambda one: -one[1]))

    def failed(self) -> Any:
        """The rows of the ledger that did not succeed."""
        return self._reader.failed()

    def explain(self, row_id: str) -> str:
        """What became of one row, in words."""
        rows = self._reader.find(str(row_id))
        if not rows:
            return f"There is no row '{row_id}' in the ledger."
        return "\n\n".join(_explained(row) for row in rows)

    def verify(self) -> Balance:
        """Prove that every row is in the ledger once, with an end; raises `LedgerUnbalanced` if not."""
        facts = self._reader.facts()
        submitted = facts.rows if self.submitted is None else self.submitted
        faults = []
        if submitted != facts.rows or sum(self.counts.values()) != facts.rows:
            faults.append(f"{submitted:,} rows were submitted, and {facts.rows:,} are in the ledger")
        if self._is_unique and facts.ids != facts.rows:
            faults.append(f"{facts.rows:,} rows share {facts.ids:,} row ids")
        if facts.unended:
            faults.append(f"{facts.unended:,} rows have no end")
        if facts.contradictory:
            faults.append(f"of {facts.contradictory:,} rows, the status does not fit what their dispatchers did")
        if faults:
            raise LedgerUnbalanced(self.path, tuple(faults))
        return Balance(submitted, facts.rows, facts.ids, self.counts)

    def show(self) -> None:
        """Print a summary."""
        print(self)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        took = f" in {self.seconds:.1f} s, {total / self.seconds:,.0f} rows/s" if self.seconds else ""
        lines = [f"{total:,} rows{took}"]
        lines += [
            f"  {status or 'no status':<18}{count:>14,}  {count / total:8.2%}" for status, count in self.counts.items()
        ]
        if not set(self.counts) <= set(DONE):
            lines += [f"  {one.rows:>10,} × {one.code}: {_short(one.example)}" for one in self._reader.errors(5)]
        return "\n".join([*lines, f"  ledger: {self.path}"])


def _about(spark: Any, path: str) -> tuple[str, Any]:
    """The folder, and what is written beside its ledger."""
    if spark is None:
        file = Path(path) / ABOUT
        return path, json.loads(file.read_text()) if file.exists() else None
    from raydispatch.spark.files import Folder

    folder = Folder(spark, path)
    return folder.path, folder.read(ABOUT)


def _explained(row: Mapping[str, Any]) -> str:
    lines = [f"Row {row['row_id']}: {row['status']}", f"  topic {row['topic']}, type {row['message_type']}"]
    lines += [
        f"  {one['id']}: {one['status']} after {one['attempts']} "
        f"{'try' if one['attempts'] == 1 else 'tries'}{' (' + one['error_code'] + ')' if one['error_code'] else ''}"
        for one in row["dispatchers"]
    ]
    if row["error"]:
        lines.append(f"  error {row['error_code']}: {row['error']}")
    if row["outputs"]:
        lines.append(f"  sent on to {', '.join(row['outputs'])}")
    lines.append(f"  {row['duration_ms']:.1f} ms, correlation {row['correlation_id']}, table {row['table_version']}")
    return "\n".join(lines)


def _short(text: str | None, most: int = 100) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
