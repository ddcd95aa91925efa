"""How far a job is: a bar with rows, rows per second, and the statuses so far."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

COLOURS = {"success": "green", "skipped": "cyan", "routed": "green"}


class Rows:
    """The rows of a job that are done, by status, as they were last told."""

    def __init__(self) -> None:
        self._started = monotonic()
        self.counts: Mapping[str, int] = {}

    @property
    def done(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    def in_words(self) -> str:
        """Rows, rows per second, and statuses, in a line."""
        rate = self.done / max(monotonic() - self._started, 1e-9)
        statuses = [f"[{colour(name)}]{escape(name)} {count:,}[/]" for name, count in self.counts.items()]
        return "  ".join([f"{self.done:,} rows  {rate:,.0f} rows/s", *statuses])


@contextmanager
def bar(console: Console, rows: Rows, total: int | None) -> Iterator[Callable[[dict[str, int]], None]]:
    """Draw a bar while the block runs; what it yields is told the rows so far."""
    columns = (
        SpinnerColumn(),
        BarColumn(30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(rows.in_words(), total=total)

        def tell(counts: dict[str, int]) -> None:
            rows.counts = counts
            progress.update(task, completed=rows.done, description=rows.in_words())

        yield tell


def colour(status: str) -> str:
    """Green is for what went well."""
    return COLOURS.get(status, "yellow")
