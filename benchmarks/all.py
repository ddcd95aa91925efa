"""Runs every benchmark beside this file, shows what they measured, and writes it to results/summary.md."""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness import Bar, bar_text, show, value_text

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 900
SUMMARY = HERE / "results" / "summary.md"

Results = dict[str, list[Bar] | None]
"""The bars of each benchmark by its name; None if it broke before it could tell."""


def main() -> None:
    quick = _quick()
    results: Results = {}
    for path in benchmarks():
        results[path.stem] = measured(path, quick)
        report(path.stem, results[path.stem])
    SUMMARY.parent.mkdir(exist_ok=True)
    SUMMARY.write_text(summary(results, quick), encoding="utf-8")
    sys.exit(0 if all(bars is not None and all(bar.ok for bar in bars) for bars in results.values()) else 1)


def benchmarks() -> list[Path]:
    others = (Path(__file__).name, "harness.py", "soak.py", "soak_delivery.py")
    return [path for path in sorted(HERE.glob("[a-z]*.py")) if path.name not in others]


def measured(path: Path, quick: bool) -> list[Bar] | None:
    """The bars of one benchmark. It gets a process of its own, so that none warms up or slows down another."""
    command = [sys.executable, str(path), "--json", *(["--quick"] if quick else [])]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=LIMIT_SECONDS).stdout
        rows = json.loads(output)["bars"]
        return [Bar(row["name"], row["value"], row["bar"], row["better"], row["unit"]) for row in rows]
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return None


def report(name: str, bars: list[Bar] | None) -> None:
    if bars is None:
        print(f"{name}: broke, or took too long; its error is above.")
    else:
        show(name, bars)


def summary(results: Results, quick: bool) -> str:
    """All bars as a Markdown table, under a line that says where they come from."""
    where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} processors"
    when = f"{datetime.now(UTC):%Y-%m-%d}{', quick run' if quick else ''}"
    lines = ["# Benchmarks", "", f"{where}; {when}.", ""]
    lines += ["| benchmark | measured | value | bar | verdict |", "| --- | --- | --- | --- | --- |"]
    for name, bars in results.items():
        lines += [_row(name, bar) for bar in bars] if bars is not None else [f"| {name} | | | | broke |"]
    return "\n".join(lines) + "\n"


def _row(name: str, bar: Bar) -> str:
    measured_name = bar.name.replace("|", r"\|")
    verdict = "ok" if bar.ok else "**falls short**"
    return f"| {name} | {measured_name} | {value_text(bar)} | {bar_text(bar)} | {verdict} |"


def _quick() -> bool:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="pass --quick on: under a minute for each benchmark")
    return bool(parser.parse_args().quick)


if __name__ == "__main__":
    main()
