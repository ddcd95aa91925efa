"""Bar charts as SVG, in a few lines: no library, and a file that a diff can show."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, LABEL, ROW, TOP = 720, 250, 34, 52
INK, OURS, PEER, LINE = "#24292f", "#1f6feb", "#afb8c1", "#d1242f"


class Column(NamedTuple):
    """One bar of a chart."""

    label: str
    value: float
    is_ours: bool = False


def write_chart(path: Path, title: str, unit: str, columns: Sequence[Column], bar: float, bar_label: str) -> None:
    """Horizontal bars, and a line where ours has to reach, or to end."""
    scale = (WIDTH - LABEL - 110) / max(bar, *(column.value for column in columns))
    height = TOP + ROW * len(columns) + 30
    x = LABEL + bar * scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *(_column(column, TOP + ROW * number, scale, unit) for number, column in enumerate(columns)),
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 22}" stroke="{LINE}" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{height - 8}" fill="{LINE}" text-anchor="middle">{escape(bar_label)}</text>',
        "</svg>",
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _column(column: Column, y: int, scale: float, unit: str) -> str:
    width = max(1.0, column.value * scale)
    middle = y + 16
    return (
        f'<text x="{LABEL - 10}" y="{middle}" text-anchor="end">{escape(column.label)}</text>'
        f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{ROW - 12}" rx="2" '
        f'fill="{OURS if column.is_ours else PEER}"/>'
        f'<text x="{LABEL + width + 6:.1f}" y="{middle}">{_number(column.value)} {escape(unit)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
