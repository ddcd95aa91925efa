"""`raydispatch dead-letters`: what dispatchers could not handle. To be looked at, sent again, or let go of."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.markup import escape

from raydispatch.cli.app import Json
from raydispatch.cli.letter_box import LetterBox, letter_box
from raydispatch.cli.letter_view import as_data, grouped, listed, show
from raydispatch.cli.moment import moment
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.letters import EVERY, LetterFilter
from raydispatch.errors import InvalidParameter

dead_letters = typer.Typer(
    help="Look at messages that dispatchers could not handle, send them again, or let go of them.",
    no_args_is_help=True,
)


def _filter(what: str, metavar: str, name: str | None = None) -> Any:
    names = [name] if name else []
    return typer.Option(*names, help=what, metavar=metavar, show_default=False, rich_help_panel="Which ones")


Name = Annotated[
    str | None,
    typer.Argument(help="The system: the name of its engine, or the one that `deploy --name` gave it.", metavar="NAME"),
]
NameOption = Annotated[str | None, typer.Option("--name", help="The same, as an option.", show_default=False)]
Journal = Annotated[
    str | None,
    typer.Option(
        help="The journal of a system that does not run: sqlite:///path/orders.db, or nats://host:4222.",
        metavar="URL",
        show_default=False,
    ),
]
Dispatcher = Annotated[str | None, _filter("Of this dispatcher.", "ID")]
Error = Annotated[str | None, _filter("With this class of exception, or error code.", "NAME")]
Since = Annotated[str | None, _filter("Failed at this time or later: 2026-03-01T12:00, or 2h, 30m, 7d ago.", "TIME")]
Until = Annotated[str | None, _filter("Failed before this time.", "TIME")]
Key = Annotated[str | None, _filter("With this key.", "KEY")]
Id = Annotated[str | None, _filter("The message of this id.", "UUID", "--id")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell which ones and how many.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dead_letters.command("list")
def list_(
    name: Name = None,
    journal: Journal = None,
    dispatcher: Dispatcher = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    message_id: Id = None,
    limit: Annotated[int, typer.Option(help="How many to show at most.", min=1)] = 50,
    as_json: Json = False,
    name_option: NameOption = None,
) -> None:
    """List dead letters, the newest first.

    For example: raydispatch dead-letters list orders --dispatcher billing --since 2h
    """
    wanted = _wanted(dispatcher, error, since, until, key, message_id)
    with _box(name, name_option, journal) as box:
        letters = _newest_first(box.find(wanted))
    shown = letters[:limit]
    if as_json:
        print(json.dumps({"total": len(letters), "letters": [as_data(letter) for letter in shown]}, indent=2))
        return
    console = Console()
    if not letters:
        console.print(_none(wanted))
        return
    console.print(listed(shown, console.width))
    if more := len(letters) - len(shown):
        console.print(f"… and {more:,} older ones: --limit {len(letters)} shows them all.", highlight=False)


@dead_letters.command("show")
def show_(
    words: Annotated[
        list[str],
        typer.Argument(help="The system, unless --name names it; and the message's id.", metavar="[NAME] MESSAGE_ID"),
    ],
    journal: Journal = None,
    dispatcher: Dispatcher = None,
    as_json: Json = False,
    name_option: NameOption = None,
) -> None:
    """Show everything about a message that failed: error, attempts, headers, payload. Exit code 1 if there is none.

    For example: raydispatch dead-letters show orders 6f1c9a52-0f4e-4b63-9a07-55b5a3a5c0de
    """
    if len(words) > 2:
        raise InvalidParameter("Give one message's id: raydispatch dead-letters show orders MESSAGE_ID.")
    wanted = _wanted(dispatcher, None, None, None, None, words[-1])
    with _box(words[0] if len(words) == 2 else None, name_option, journal) as box:
        letters = _newest_first(box.find(wanted))
    if as_json:
        print(json.dumps([as_data(letter) for letter in letters], indent=2))
    elif not letters:
        Console(stderr=True).print(f"There is no dead letter of the message {wanted.message_id}.", highlight=False)
    for number, letter in enumerate(() if as_json else letters):
        print(end="\n" if number else "")
        show(letter, Console())
    raise typer.Exit(0 if letters else 1)


@dead_letters.command()
def redrive(
    name: Name = None,
    journal: Journal = None,
    dispatcher: Dispatcher = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    message_id: Id = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    name_option: NameOption = None,
) -> None:
    """Send dead letters again, each to the dispatcher that failed, and with the same message id.

    With --journal they go back into the log, and are delivered when the system starts.

    For example: raydispatch dead-letters redrive orders --error ConnectionError --dry-run
    """
    wanted = _wanted(dispatcher, error, since, until, key, message_id)
    _check_care(wanted, dry_run or yes)
    with _box(name, name_option, journal) as box:
        found = box.find(wanted)
        letters = box.redrivable(found)
        if not _agreed("redrive", wanted, found, letters, dry_run, yes, box.warning):
            return
        count = box.redrive(_seen(wanted, letters))
    when = "" if journal is None else ", to be delivered when the system starts"
    Console().print(f"{_many(count)} redriven{when}.", highlight=False, soft_wrap=True)


@dead_letters.command()
def purge(
    name: Name = None,
    journal: Journal = None,
    dispatcher: Dispatcher = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    message_id: Id = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    name_option: NameOption = None,
) -> None:
    """Let go of dead letters, for good.

    For example: raydispatch dead-letters purge orders --until 30d --dry-run
    """
    wanted = _wanted(dispatcher, error, since, until, key, message_id)
    _check_care(wanted, dry_run or yes)
    with _box(name, name_option, journal) as box:
        found = box.find(wanted)
        letters = box.purgeable(found)
        if not _agreed("purge", wanted, found, letters, dry_run, yes):
            return
        count = box.purge(_seen(wanted, letters))
    Console().print(f"{_many(count)} purged.", highlight=False)


def _wanted(
    dispatcher: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
    key: str | None,
    message_id: str | None,
) -> LetterFilter:
    start = None if since is None else moment("--since", since)
    end = None if until is None else moment("--until", until)
    if start is not None and end is not None and start >= end:
        raise InvalidParameter(f"Nothing is between --since {since} and --until {until}: exchange them.")
    return LetterFilter(dispatcher, error, key, start, end, None if message_id is None else _uuid(message_id))


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidParameter(f"{text!r} is no message id: those are UUIDs, as `list` shows them.") from None


def _box(name: str | None, option: str | None, journal: str | None) -> AbstractContextManager[LetterBox]:
    if name is not None and option is not None and name != option:
        raise InvalidParameter(f"'{name}' or '{option}': name one system.")
    name = name or option
    if not name:
        raise InvalidParameter(
            "Name the system: raydispatch dead-letters list orders. If it does not run, name its journal, too: "
            "--journal sqlite:///path/orders.db --name orders."
        )
    return letter_box(name, journal)


def _check_care(wanted: LetterFilter, is_settled: bool) -> None:
    """Where nobody can be asked, all letters at once must be asked for expressly."""
    if wanted == EVERY and not is_settled and not _on_terminal():
        raise InvalidParameter(
            "That would be all dead letters, and there is no terminal to ask on: add --yes, a filter, or --dry-run."
        )


def _agreed(
    verb: str,
    wanted: LetterFilter,
    found: Sequence[DeadLetter],
    letters: Sequence[DeadLetter],
    dry_run: bool,
    yes: bool,
    warning: str | None = None,
) -> bool:
    """Tell what it is about, and ask, if somebody is there; whether to go on."""
    console = Console()
    if not found:
        console.print(_none(wanted))
        return False
    console.print(grouped(letters))
    if stay := len(found) - len(letters):
        console.print(f"{_many(stay)} in memory stay: their payloads are no data.", highlight=False)
    if dry_run:
        console.print(f"{_many(len(letters))} to {verb}; this was a dry run.", highlight=False)
        return False
    if letters and not yes:
        _ask(f"{verb.capitalize()} {_many(len(letters))}?", warning, console)
    return bool(letters)


def _ask(question: str, warning: str | None, console: Console) -> None:
    if _on_terminal():
        if warning:
            console.print(f"[yellow]{escape(warning)}[/yellow]", highlight=False, soft_wrap=True)
        typer.confirm(question, abort=True)
    elif warning:
        raise InvalidParameter(f"{warning} There is no terminal to ask on: add --yes.")


def _seen(wanted: LetterFilter, letters: Sequence[DeadLetter]) -> LetterFilter:
    """The same, without what came after those that were shown."""
    end = max(letter.last_at for letter in letters) + timedelta(microseconds=1)
    return wanted._replace(until=end)


def _newest_first(letters: Sequence[DeadLetter]) -> list[DeadLetter]:
    return sorted(letters, key=lambda letter: letter.last_at, reverse=True)


def _none(wanted: LetterFilter) -> str:
    return "There are no dead letters." if wanted == EVERY else "No dead letter is like that."


def _many(count: int) -> str:
    return f"{count:,} dead letter{'' if count == 1 else 's'}"


def _on_terminal() -> bool:
    return sys.stdin.isatty()
