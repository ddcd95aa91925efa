"""The ledger: what became of every message."""

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus
from raydispatch.messages.envelope import Envelope

Message = tuple[str, Envelope[object]]


class Ledger:
    """Counts messages on their way out, and results on their way in: in the end, both must be the same number."""

    def __init__(self) -> None:
        self.sent = 0
        self._counts: Counter[tuple[str, DispatchStatus]] = Counter()
        self._examples: dict[tuple[str, DispatchStatus], DispatchResult] = {}

    @property
    def ended(self) -> int:
        """Results so far."""
        return self._counts.total()

    @property
    def adds_up(self) -> bool:
        """Whether each message that was sent has one entry."""
        return self.ended == self.sent

    def outgoing(self, messages: Iterable[Message]) -> Iterator[Message]:
        """The same messages, counted as they are taken."""
        for message in messages:
            self.sent += 1
            yield message

    def enter(self, result: DispatchResult) -> None:
        """One message has ended."""
        entry = (result.topic, result.status)
        self._counts[entry] += 1
        self._examples.setdefault(entry, result)

    def show(self, console: Console) -> None:
        """The entries, and their sum."""
        table = Table()
        table.add_column("topic", no_wrap=True)
        table.add_column("status")
        table.add_column("messages", justify="right")
        table.add_column("for example")
        entries = sorted(self._counts.items())
        for (topic, status), count in entries:
            what = escape(_told(self._examples[topic, status]))
            colour = "green" if status is DispatchStatus.SUCCESS else "yellow"
            table.add_row(topic, f"[{colour}]{status}[/{colour}]", f"{count:,}", what)
        console.print(table)
        counts = " + ".join(f"{count:,}" for _, count in entries)
        verdict = "[green]every message has its entry[/green]" if self.adds_up else "[red]that does not add up[/red]"
        console.print(
            f"{counts} = {self.ended:,} entries, for {self.sent:,} messages sent: {verdict}.",
            highlight=False,
            soft_wrap=True,
        )


def _told(result: DispatchResult) -> str:
    """How it ended, in words."""
    if result.error_message:
        return result.error_message
    ran = " and ".join(outcome.dispatcher_id for outcome in result.outcomes)
    return f"{ran} ran" + (f", out came {', '.join(result.outputs)}" if result.outputs else "")
