"""What every benchmark shares: bars to clear, peers measured side by side, one way to report."""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table


class Bar(NamedTuple):
    """A measured value and what it has to reach."""

    name: str
    value: float
    bar: float
    better: Literal["higher", "lower"]
    unit: str

    @property
    def ok(self) -> bool:
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


class Work(NamedTuple):
    """Something to time, and how many items it works through."""

    run: Callable[[], object]
    items: int = 1


Prepare = Callable[[int], Work]
"""Given the number of the round, makes that round's work; the making is not timed."""


def run(title: str, bars: Callable[[bool], Iterable[Bar]]) -> None:
    """Measure (the function is told whether to be quick), report, and exit with 1 when a bar falls short."""
    options = _options(title)
    # Standard output belongs to the report: with --json, a stray print would spoil it.
    with redirect_stdout(sys.stderr):
        measured = list(bars(options.quick))
    if options.json:
        print(json.dumps({"bars": [bar._asdict() | {"ok": bar.ok} for bar in measured]}))
    else:
        show(title, measured)
    sys.exit(0 if all(bar.ok for bar in measured) else 1)


def measure(peers: Mapping[str, Prepare], rounds: int) -> dict[str, list[float]]:
    """Seconds per item of each peer, one for each round.

    All peers run in every round, so that a busy moment of the machine hits them alike; who starts changes from round
    to round, so that nobody always finds the caches warm.
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds):
        for name in _rotated(list(peers), number):
            seconds[name].append(_seconds_per_item(peers[name](number)))
    return seconds


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of the rounds: no round is compared with another one."""
    return median(above / below for above, below in zip(numerators, denominators, strict=True))


def show(title: str, bars: Iterable[Bar]) -> None:
    """Print the bars as a table."""
    table = Table("name", "value", "bar", "verdict", title=title, title_justify="left")
    for bar in bars:
        verdict = "[green]ok[/]" if bar.ok else "[red]falls short[/]"
        table.add_row(bar.name, value_text(bar), bar_text(bar), verdict)
    Console().print(table)


def value_text(bar: Bar) -> str:
    return f"{_number(bar.value)} {bar.unit}"


def bar_text(bar: Bar) -> str:
    return f"{'≥' if bar.better == 'higher' else '≤'} {_number(bar.bar)} {bar.unit}"


def _options(title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


def _rotated(names: list[str], by: int) -> list[str]:
    start = by % len(names)
    return names[start:] + names[:start]


def _seconds_per_item(work: Work) -> float:
    # Nobody pays for the garbage that another one left.
    gc.collect()
    start = perf_counter()
    work.run()
    return (perf_counter() - start) / work.items


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
