"""What the demo shows: headings and sentences, and below them the system, live."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from raydispatch.cli.status import Look, Watch, drawn
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.errors import SystemUnavailable

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem


class Screen:
    """A table that changes in its place on a terminal; elsewhere, a line each second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = monotonic()

    def heading(self, title: str, *lines: str) -> None:
        """A new part, and what it is about."""
        self._console.print(f"\n[bold cyan]{title}[/bold cyan]", highlight=False)
        for line in lines:
            self._console.print(f"  {line}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Something happened just now."""
        self._console.print(f"  [dim]{self._seconds():5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    @contextmanager
    def watching(self, system: "DispatchSystem") -> Iterator[None]:
        """Show the system as it is, as long as the block runs."""
        ended = threading.Event()
        follow = self._follow_live if self._console.is_terminal else self._follow_in_lines
        follower = threading.Thread(target=follow, args=(Watch(system), ended), name="demo screen", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join(10)

    def _follow_live(self, watch: Watch, ended: threading.Event) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            for look in _looks(watch, ended, 0.5):
                live.update(drawn(look), refresh=True)

    def _follow_in_lines(self, watch: Watch, ended: threading.Event) -> None:
        for look in _looks(watch, ended, 1.0):
            self.say(f"[dim]{_in_a_line(look)}[/dim]")

    def _seconds(self) -> float:
        return monotonic() - self._started


def _looks(watch: Watch, ended: threading.Event, seconds: float) -> Iterator[Look]:
    with suppress(SystemUnavailable):  # It was stopped.
        watch.look()
        while not ended.wait(seconds):
            yield watch.look()


def _in_a_line(look: Look) -> str:
    parts = [f"{look.messages_per_second:,.0f} messages/s"]
    for name, part in sorted(look.status.dispatchers.items()):
        circuit = "" if part.circuit is CircuitState.CLOSED else f" ({part.circuit})"
        replicas = f" x{len(part.replicas)}" if len(part.replicas) > 1 else ""
        parts.append(f"{name}{replicas} {part.handled:,}{circuit}")
    return " | ".join(parts)
