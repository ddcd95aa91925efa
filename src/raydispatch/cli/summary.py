"""What became of the rows of a job, for people and for programs."""

from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.bar import colour

if TYPE_CHECKING:
    from raydispatch.spark.dry_run import DryRun
    from raydispatch.spark.report import RouteReport

MOST = 5
"""Errors that are shown; the ledger has them all."""


class Trouble(NamedTuple):
    """Rows that ended in the same way."""

    status: str
    error_code: str | None
    rows: int
    example: str | None


class Summary:
    """The end of a job."""

    def __init__(self, report: "RouteReport") -> None:
        self._report = report
        self._troubles = _troubles(report) if set(report.counts) - {"success", "skipped"} else []

    @property
    def all_succeeded(self) -> bool:
        """Whether every row that was read is in the ledger, and none failed."""
        return not self._troubles and self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether every row that was read is in the ledger."""
        return self._report.submitted in (None, sum(self._report.counts.values()))

    def as_data(self) -> dict[str, object]:
        """For programs."""
        report, total = self._report, sum(self._report.counts.values())
        return {
            "succeeded": self.all_succeeded,
            "rows": total,
            "submitted": report.submitted,
            "seconds": report.seconds and round(report.seconds, 3),
            "counts": report.counts,
            "errors": [trouble._asdict() for trouble in self._troubles],
            "ledger": report.path,
            "job_id": report.job_id,
        }

    def show(self, console: Console) -> None:
        """For people."""
        report, total = self._report, sum(self._report.counts.values())
        seconds = report.seconds or 0.0
        rate = f", {total / seconds:,.0f} rows/s" if seconds else ""
        console.print(f"[bold]{total:,} rows[/bold] in {seconds:.1f} s{rate}", highlight=False)
        console.print(counted(report.counts))
        if self._troubles:
            console.print(_drawn(self._troubles))
        if not self.is_complete:
            missing = f"{report.submitted:,} rows were read, and {total:,} are in the ledger"
            console.print(f"[red]{missing}: that does not add up[/red]", highlight=False)
        console.print(f"ledger: {escape(report.path)}", highlight=False, soft_wrap=True)


class Preview:
    """The end of a dry run."""

    def __init__(self, dry_run: "DryRun") -> None:
        # Everything is asked for here, where Ctrl-C may break it off.
        self._text = dry_run.text()
        self._data: dict[str, object] = {
            "rows": sum(dry_run.counts.values()),
            "counts": dry_run.counts,
            "dispatchers": dry_run.dispatchers,
            "routes": dry_run.routes,
            "unmatched": [row.asDict() for row in dry_run.unmatched.collect()],
        }
        self.all_routed = set(dry_run.counts) <= {"routed"}
        """Whether every row has a dispatcher."""

    def as_data(self) -> dict[str, object]:
        """For programs."""
        return {"succeeded": self.all_routed, **self._data}

    def show(self, console: Console) -> None:
        """For people."""
        console.print(self._text, highlight=False, markup=False, soft_wrap=True)


def counted(counts: dict[str, int]) -> Table:
    """Rows by status."""
    table = _table("status")
    table.add_column("rows", justify="right")
    table.add_column("share", justify="right")
    total = sum(counts.values())
    for status, count in counts.items():
        table.add_row(f"[{colour(status)}]{escape(status)}[/]", f"{count:,}", f"{count / total:.2%}")
    return table


def _troubles(report: "RouteReport") -> list[Trouble]:
    """The most frequent ones first."""
    grouped = report.failed().groupBy("status", "error_code").agg({"*": "count", "error": "first"})
    rows: list[Any] = grouped.collect()
    found = [Trouble(row["status"], row["error_code"], row["count(1)"], row["first(error)"]) for row in rows]
    return sorted(found, key=lambda trouble: -trouble.rows)


def _drawn(troubles: list[Trouble]) -> Table:
    table = _table("what went wrong")
    table.add_column("rows", justify="right")
    table.add_column("for example")
    for trouble in troubles[:MOST]:
        table.add_row(trouble.error_code or trouble.status, f"{trouble.rows:,}", escape(_short(trouble.example)))
    if len(troubles) > MOST:
        table.add_row(f"… and {len(troubles) - MOST} more kinds", "", "")
    return table


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def _short(text: str | None, most: int = 200) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
