"""`raydispatch status`: how a system on Ray is, and how that is drawn."""

import json
from collections.abc import Mapping
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from raydispatch.cli.app import Json
from raydispatch.cli.system import Name, attach
from raydispatch.dispatch.breaker import CircuitState

if TYPE_CHECKING:
    from raydispatch.actors.status import DispatcherStatus, SystemStatus
    from raydispatch.actors.system import DispatchSystem

_COLOURS = {CircuitState.CLOSED: "green", CircuitState.HALF_OPEN: "yellow", CircuitState.OPEN: "red"}


def status(name: Name, as_json: Json = False) -> None:
    """Show how a system on Ray is: circuits, replicas, queues, routers. Rates are those of one second."""
    with attach(name) as system:
        watch = Watch(system)
        watch.look()
        sleep(1)
        look = watch.look()
    if as_json:
        print(json.dumps(_as_data(look), indent=2))
    else:
        Console().print(drawn(look))


class Look(NamedTuple):
    """A system as it was at one moment, and how fast it went since the moment before."""

    status: "SystemStatus"
    messages_per_second: float
    handled_per_second: Mapping[str, float]
    """By dispatcher."""


class Watch:
    """Looks at a system again and again. Its rates are those since its own last look, whoever else looks."""

    def __init__(self, system: "DispatchSystem") -> None:
        self._system = system
        self._before: tuple[float, int, Mapping[str, int]] | None = None

    def look(self) -> Look:
        """How it is now."""
        status = self._system.status()
        now, routed = monotonic(), sum(router.routed for router in status.routers)
        handled = {name: part.handled for name, part in status.dispatchers.items()}
        then, routed_then, handled_then = self._before or (now, routed, handled)
        self._before = (now, routed, handled)
        seconds = max(now - then, 1e-9)
        # Actors that were started again count from 0: no rate is below that.
        rates = {name: max(0.0, (count - handled_then.get(name, 0)) / seconds) for name, count in handled.items()}
        return Look(status, max(0.0, (routed - routed_then) / seconds), rates)


def drawn(look: Look) -> Group:
    """The system as a headline and tables; that of subscriptions, if it has a journal."""
    tables = [_dispatchers(look), *([_subscriptions(look)] if look.status.subscriptions else []), _routers(look)]
    return Group(_headline(look), *(part for table in tables for part in ("", table)))


def _headline(look: Look) -> str:
    status = look.status
    return (
        f"[bold]{escape(status.name)}[/bold]: {look.messages_per_second:,.0f} messages/s, "
        f"{status.dead_letters:,} dead letters, table {status.table_version}{', leased' if status.has_lease else ''}"
    )


def _dispatchers(look: Look) -> Table:
    table = _table("dispatcher", "circuit", "replicas", "in flight", "queue", "handled", "per s", "restarts")
    for name, part in sorted(look.status.dispatchers.items()):
        colour = _COLOURS[part.circuit]
        table.add_row(
            escape(name), f"[{colour}]{part.circuit}[/{colour}]", _alive(part), f"{part.in_flight:,}",
            f"{part.queue:,}", f"{part.handled:,}", f"{look.handled_per_second[name]:,.0f}", f"{_restarts(part):,}",
        )  # fmt: skip
    return table


def _subscriptions(look: Look) -> Table:
    table = _table("name", "mode", "lag", "in flight", "waiting", "retried", "given up")
    for one in sorted(look.status.subscriptions, key=lambda one: one.name):
        table.add_row(
            escape(one.name), f"{'reliable_' if one.reliable else ''}{one.mode}", f"{one.lag:,}", f"{one.in_flight:,}",
            f"{one.waiting:,}", f"{one.retried:,}", f"{one.given_up:,}",
        )  # fmt: skip
    return table


def _routers(look: Look) -> Table:
    table = _table("router", "state", "in flight", "routed", "restarts")
    for router in look.status.routers:
        behind = router.alive and router.table_version != look.status.table_version
        state = "[red]away[/red]" if not router.alive else "[yellow]old table[/yellow]" if behind else "well"
        table.add_row(escape(router.name), state, f"{router.in_flight:,}", f"{router.routed:,}", f"{router.restarts:,}")
    return table


def _table(*headings: str) -> Table:
    # Without lines between the columns, all of them fit into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_word = heading in ("dispatcher", "router", "circuit", "state", "name", "mode")
        table.add_column(heading, justify="left" if is_word else "right", no_wrap=True)
    return table


def _alive(part: "DispatcherStatus") -> str:
    alive = sum(replica.alive for replica in part.replicas)
    return f"{alive}" if alive == len(part.replicas) else f"[red]{alive} of {len(part.replicas)}[/red]"


def _restarts(part: "DispatcherStatus") -> int:
    return sum(replica.restarts for replica in part.replicas)


def _as_data(look: Look) -> dict[str, object]:
    data: dict[str, object] = look.status.model_dump(mode="json")
    data["messages_per_second"] = round(look.messages_per_second, 1)
    data["dispatchers"] = {
        name: {
            **part.model_dump(mode="json"),
            "in_flight": part.in_flight,
            "queue": part.queue,
            "handled": part.handled,
            "handled_per_second": round(look.handled_per_second[name], 1),
            "restarts": _restarts(part),
        }
        for name, part in look.status.dispatchers.items()
    }
    return data
