"""How dead letters look. What comes from messages is shown, and never obeyed: a terminal must not be tricked by it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
from pydantic_core import PydanticSerializationError, to_json
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydispatch.delivery.dead_letters import DeadLetter

WIDE = 120
"""Characters that one line for each letter takes."""


def visible(text: object) -> str:
    """In one line, and without characters that a terminal would obey: escape sequences, changes of direction."""
    return "".join(one if one.isprintable() else _escaped(one) for one in str(text))


def as_data(letter: DeadLetter) -> dict[str, object]:
    """Everything about it, for programs."""
    envelope, outcome = letter.envelope, letter.outcome
    return {
        "message_id": str(envelope.message_id),
        "dispatcher": outcome.dispatcher_id,
        "topic": letter.topic,
        "message_type": envelope.message_type,
        "key": envelope.key,
        "status": outcome.status.value,
        "error_code": outcome.error_code and outcome.error_code.value,
        "error_type": outcome.error_type,
        "error": outcome.error_message,
        "attempts": outcome.attempts,
        "first_at": letter.first_at.isoformat(),
        "last_at": letter.last_at.isoformat(),
        "route": outcome.route_id,
        "table_version": letter.table_version,
        "correlation_id": str(envelope.correlation_id),
        "causation_id": envelope.causation_id and str(envelope.causation_id),
        "traceparent": envelope.traceparent,
        "message_attempt": envelope.attempt,
        "hops": envelope.hops,
        "headers": dict(envelope.headers),
        "payload": _plain(envelope.payload),
    }


def listed(letters: Sequence[DeadLetter], width: int) -> Table:
    """One line each, or two where the screen is narrow."""
    return _wide(letters) if width >= WIDE else _narrow(letters)


def _wide(letters: Sequence[DeadLetter]) -> Table:
    table = _table("when", "dispatcher", "topic", "type", "key", "error", "attempts", "message id")
    table.columns[6].justify = "right"
    for column in (table.columns[0], table.columns[7]):
        column.no_wrap = True  # An id that was cut is of no use.
    for letter in letters:
        envelope, outcome = letter.envelope, letter.outcome
        cells = (
            _when(letter), outcome.dispatcher_id, letter.topic, envelope.message_type, envelope.key or "",
            _error_of(letter), outcome.attempts, envelope.message_id,
        )  # fmt: skip
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _narrow(letters: Sequence[DeadLetter]) -> Table:
    table = _table("when\nattempts", "dispatcher\nerror", "topic, type, key\nmessage id")
    table.columns[0].no_wrap = True
    for letter in letters:
        envelope, outcome = letter.envelope, letter.outcome
        what = [letter.topic, envelope.message_type, *([envelope.key] if envelope.key is not None else [])]
        cells = (
            (_when(letter), outcome.attempts),
            (outcome.dispatcher_id, _error_of(letter)),
            (", ".join(what), envelope.message_id),
        )
        table.add_row(*(Text("\n".join(map(visible, lines))) for lines in cells))
    return table


def grouped(letters: Iterable[DeadLetter]) -> Table:
    """How many, by dispatcher and error; the most frequent first."""
    table = _table("dispatcher", "error", "letters")
    table.columns[2].justify = "right"
    counts = Counter((letter.outcome.dispatcher_id, _error_of(letter)) for letter in letters)
    for (dispatcher_id, error), count in counts.most_common():
        table.add_row(Text(visible(dispatcher_id)), Text(visible(error)), f"{count:,}")
    return table


def show(letter: DeadLetter, console: Console) -> None:
    """Everything about it, for people."""
    data = as_data(letter)
    payload, headers = data.pop("payload"), data.pop("headers")
    data |= {"first_at": _local(letter.first_at), "last_at": _local(letter.last_at)}
    for name, value in data.items():
        if value is not None:
            _print(console, f"{name.replace('_', ' ')}:", visible(value))
    assert isinstance(headers, Mapping)
    for name, value in headers.items():
        _print(console, "header:", f"{visible(name)}: {visible(value)}")
    _print(console, "payload:", "")
    for line in json.dumps(payload, indent=2, ensure_ascii=False).split("\n"):
        console.print(Text(f"  {visible(line)}"), soft_wrap=True)


def _print(console: Console, name: str, value: str) -> None:
    console.print(Text.assemble((f"{name:<16}", "bold"), value), soft_wrap=True)


def _escaped(character: str) -> str:
    short = json.dumps(character)[1:-1]
    return short if short != character else f"\\u{ord(character):04x}"  # JSON leaves DEL as it is.


def _error_of(letter: DeadLetter) -> str:
    """Its class: for a handler's exception, that; else the code."""
    outcome = letter.outcome
    return outcome.error_type or outcome.error_code or outcome.status


def _when(letter: DeadLetter) -> str:
    return f"{letter.last_at.astimezone():%m-%d %H:%M:%S}"


def _local(at: datetime) -> str:
    return at.astimezone().isoformat(sep=" ", timespec="milliseconds")


def _plain(payload: Any) -> Any:
    """As JSON has it; bytes as text, if they are, and what JSON does not know as Python shows it."""
    modes: tuple[Literal["utf8"], Literal["base64"]] = ("utf8", "base64")
    for bytes_mode in modes:
        try:
            return json.loads(to_json(payload, bytes_mode=bytes_mode, inf_nan_mode="strings", fallback=_unknown))
        except (PydanticSerializationError, ValueError):
            continue
    return repr(payload)


def _unknown(value: Any) -> Any:
    return value.to_pylist() if isinstance(value, pa.Table | pa.RecordBatch) else repr(value)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
