"""`dead-letters`: on a journal that nobody uses, on a system that is only made up, and on a real Ray."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import pytest
from pydantic import BaseModel
from tests.cli.test_deploy import raydispatch
from typer.testing import CliRunner

from raydispatch import DispatchEngine, DispatchStatus, Envelope, ErrorCode, MessageCategory, Outcome
from raydispatch.cli import dead_letters as command
from raydispatch.cli import letter_box
from raydispatch.cli.letter_view import as_data, visible
from raydispatch.cli.main import app
from raydispatch.cli.moment import moment
from raydispatch.delivery.dead_letters import DeadLetter
from raydispatch.delivery.journal import Change, open_journal
from raydispatch.delivery.letters import LetterFilter, Letters, pack_letter
from raydispatch.delivery.log import Log
from raydispatch.delivery.post import CURSORS
from raydispatch.delivery.window import Cursor
from raydispatch.dispatch.clock import SystemClock
from raydispatch.errors import DispatchError, InvalidParameter, InvalidState, JournalUnavailable
from raydispatch.settings import JournalSettings, RetrySettings

TOPIC = "dev.order.events.v1"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
FIRST_ID, SECOND_ID, THIRD_ID = (UUID(int=number) for number in (1, 2, 3))


def letter_of(
    message_id: UUID,
    dispatcher_id: str = "billing",
    error_type: str | None = "ConnectionError",
    *,
    at: datetime = NOON,
    payload: Any = None,
    message: str = "no answer",
    **envelope: Any,
) -> DeadLetter:
    outcome = Outcome(
        dispatcher_id, DispatchStatus.DISPATCHER_ERROR, "orders", attempts=3,
        error_code=ErrorCode.HANDLER_EXCEPTION, error_type=error_type, error_message=message,
    )  # fmt: skip
    sent = Envelope(payload or {"order": 7}, message_type="OrderPlaced", message_id=message_id, **envelope)
    return DeadLetter(TOPIC, sent, outcome, at - timedelta(seconds=5), at, "abc")


LETTERS = (
    letter_of(FIRST_ID, key="eva"),
    letter_of(SECOND_ID, error_type="ValueError", at=NOON + timedelta(hours=1), key="max"),
    letter_of(THIRD_ID, "audit", at=NOON + timedelta(hours=2)),
)


def run(*arguments: str, columns: int = 140, **options: Any) -> Any:
    """As a program calls it: without a terminal."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["dead-letters", *arguments], **options)


def output_of(*arguments: str, **options: Any) -> str:
    done = run(*arguments, **options)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return str(done.stdout)


class Store:
    """A journal in a file, and what a command is told to find it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite://{folder / 'orders.db'}"
        self.named = ("orders", "--journal", self.url)

    def engine(self, seen: list[Envelope[Any]], *, fails: bool = False) -> DispatchEngine:
        engine = DispatchEngine("orders", journal=self.url)

        @engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT,
                           retry=RetrySettings(tries=2, first_delay_seconds=0), breaker=None)  # fmt: skip
        async def bill(envelope: Envelope[Any]) -> None:
            seen.append(envelope)
            if fails:
                raise ConnectionError("no answer")

        return engine

    async def bury(self, letters: Sequence[DeadLetter]) -> None:
        journal = await open_journal(self.url, "orders")
        log = Log(journal, JournalSettings(url=self.url), SystemClock())
        await Letters(log).bury(list(map(pack_letter, letters)))
        # Audit delivers what comes from now on: no cursor of it is kept.
        await log.write([Change(CURSORS, "billing", Cursor().pack())])
        await journal.close()

    def ids(self, *filters: str) -> set[int]:
        """Of the messages that `list` finds."""
        found = json.loads(output_of("list", *self.named, "--json", *filters))["letters"]
        return {UUID(letter["message_id"]).int for letter in found}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    asyncio.run(store.bury(LETTERS))
    return store


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_on_terminal", lambda: True)


# Looking


def test_letters_are_listed_with_the_newest_first(store: Store) -> None:
    lines = output_of("list", *store.named).splitlines()

    assert lines[0].split() == ["when", "dispatcher", "topic", "type", "key", "error", "attempts", "message", "id"]
    assert [line.split()[-1] for line in lines[2:]] == [str(THIRD_ID), str(SECOND_ID), str(FIRST_ID)]
    assert lines[3].split()[2:] == ["billing", TOPIC, "OrderPlaced", "max", "ValueError", "3", str(SECOND_ID)]


def test_in_a_narrow_terminal_ids_are_whole_too(store: Store) -> None:
    shown = output_of("list", *store.named, columns=80)

    for message_id in (FIRST_ID, SECOND_ID, THIRD_ID):
        assert str(message_id) in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_list_that_was_cut_says_how_many_there_are(store: Store) -> None:
    shown = output_of("list", *store.named, "--limit", "1")

    assert str(THIRD_ID) in shown
    assert str(SECOND_ID) not in shown
    assert "… and 2 older ones: --limit 3 shows them all." in shown


def test_a_list_as_json_counts_what_it_does_not_show(store: Store) -> None:
    content = json.loads(output_of("list", *store.named, "--limit", "2", "--json"))

    assert content["total"] == 3
    assert [letter["message_id"] for letter in content["letters"]] == [str(THIRD_ID), str(SECOND_ID)]


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (("--dispatcher", "audit"), {3}),
        (("--dispatcher", "billing", "--error", "ValueError"), {2}),
        (("--error", "handler_exception"), {1, 2, 3}),
        (("--key", "eva"), {1}),
        (("--id", str(SECOND_ID)), {2}),
        (("--since", "2026-03-01T13:00Z"), {2, 3}),
        (("--until", "2026-03-01T14:00+01:00"), {1}),
        (("--since", "2026-03-01T12:30Z", "--until", "2026-03-01T13:30Z"), {2}),
        (("--error", "KeyError"), set()),
    ],
)
def test_filters(store: Store, filters: tuple[str, ...], ids: set[int]) -> None:
    assert store.ids(*filters) == ids


def test_where_nothing_is_found_list_says_so(store: Store, tmp_path: Path) -> None:
    assert "No dead letter is like that." in output_of("list", *store.named, "--key", "otto")

    output_of("purge", *store.named, "--yes")

    assert "There are no dead letters." in output_of("list", *store.named)


def test_show_has_everything(store: Store) -> None:
    shown = output_of("show", "orders", str(FIRST_ID), "--journal", store.url)

    for words in ("billing", TOPIC, "OrderPlaced", "eva", "ConnectionError", "no answer", "abc", '"order": 7'):
        assert words in shown
    assert "attempts:       3" in shown
    moments = [line for line in shown.splitlines() if line.startswith(("first at:", "last at:"))]
    assert len(set(moments)) == 2


def test_show_shows_each_dispatcher_that_failed(store: Store) -> None:
    asyncio.run(store.bury([letter_of(FIRST_ID, "audit")]))
    arguments = (str(FIRST_ID), "--journal", store.url, "--name", "orders", "--json")

    both = json.loads(output_of("show", *arguments))
    one = json.loads(output_of("show", *arguments, "--dispatcher", "audit"))

    assert {letter["dispatcher"] for letter in both} == {"billing", "audit"}
    assert [letter["dispatcher"] for letter in one] == ["audit"]


def test_show_ends_with_1_if_there_is_no_such_letter(store: Store) -> None:
    done = run("show", "orders", str(UUID(int=9)), "--journal", store.url)

    assert done.exit_code == 1
    assert f"no dead letter of the message {UUID(int=9)}" in done.stderr


def test_nothing_from_a_message_reaches_the_terminal_as_a_command(store: Store) -> None:
    evil = letter_of(
        UUID(int=7),
        "evil",
        message="\x1b]0;owned\x07",
        payload={"\x1b[2J": "\u202egnp.exe\x9b1m\x7f", "text": "größer"},
        headers={"h\x1b": "[bold]\r\n"},
        key="\x1b[1A\n[red]k",
    )
    asyncio.run(store.bury([evil]))

    outputs = [
        output_of("show", "orders", str(UUID(int=7)), "--journal", store.url),
        output_of("list", *store.named, "--dispatcher", "evil"),
        output_of("list", *store.named, "--dispatcher", "evil", columns=80),
    ]

    for shown in outputs:
        assert all(character.isprintable() or character == "\n" for character in shown)
    assert '"text": "größer"' in outputs[0]
    assert r"\u001b[1A\n[red]k" in outputs[0]
    assert r'"\u001b[2J": "\u202egnp.exe\u009b1m\u007f"' in outputs[0]
    assert "[bold]" in outputs[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [b]", "plain [b]"),
        ("a\nb\t", r"a\nb\t"),
        ("\udc80", r"\udc80"),
        ("\U000e0001", r"\udb40\udc01"),
        (7, "7"),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: object, shown: str) -> None:
    assert visible(text) == shown


class Model(BaseModel):
    amount: float


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (Model(amount=1.5), {"amount": 1.5}),
        (b'{"a": 1}', '{"a": 1}'),
        (b"\xff", "_w=="),
        ({"at": NOON, 3: float("nan")}, {"at": "2026-03-01T12:00:00Z", "3": "NaN"}),
        (range, "<class 'range'>"),
    ],
)
def test_any_payload_can_be_shown_as_json(payload: Any, data: object) -> None:
    assert as_data(letter_of(FIRST_ID, payload=payload))["payload"] == data


def test_an_arrow_table_is_shown_as_rows() -> None:
    import pyarrow as pa

    assert as_data(letter_of(FIRST_ID, payload=pa.table({"a": [1, 2]})))["payload"] == [{"a": 1}, {"a": 2}]


# Sending again, letting go


def test_a_dry_run_counts_by_dispatcher_and_error_and_does_nothing(store: Store) -> None:
    for verb in ("redrive", "purge"):
        shown = output_of(verb, *store.named, "--dispatcher", "billing", "--dry-run")

        assert ["billing", "ValueError", "1"] in [line.split() for line in shown.splitlines()]
        assert f"2 dead letters to {verb}; this was a dry run." in shown
    assert store.ids() == {1, 2, 3}


def test_purge_lets_go_of_what_fits(store: Store) -> None:
    shown = output_of("purge", *store.named, "--dispatcher", "billing", "--error", "ValueError")

    assert "1 dead letter purged." in shown
    assert store.ids() == {1, 3}


def test_nothing_to_do_is_fine(store: Store) -> None:
    for verb in ("redrive", "purge"):
        assert "No dead letter is like that." in output_of(verb, *store.named, "--error", "KeyError")


def test_all_at_once_is_refused_where_nobody_can_be_asked(store: Store) -> None:
    for verb in ("redrive", "purge"):
        done = run(verb, *store.named)

        assert isinstance(done.exception, InvalidParameter)
        assert "no terminal to ask on" in str(done.exception)
    assert store.ids() == {1, 2, 3}

    output_of("purge", *store.named, "--yes")
    assert store.ids() == set()


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_it_asks(store: Store) -> None:
    refused = run("purge", *store.named, "--error", "ValueError", input="n\n")
    assert refused.exit_code == 1
    assert "Purge 1 dead letter?" in refused.output
    assert store.ids() == {1, 2, 3}

    assert run("purge", *store.named, "--error", "ValueError", input="y\n").exit_code == 0
    assert store.ids() == {1, 3}

    assert "?" not in output_of("purge", *store.named, "--yes")


@pytest.mark.usefixtures("terminal")
def test_what_comes_while_it_asks_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(question: str, abort: bool) -> bool:
        asyncio.run(store.bury([letter_of(UUID(int=9), at=NOON + timedelta(days=1))]))
        return True

    monkeypatch.setattr("typer.confirm", agree)

    assert "3 dead letters purged" in output_of("purge", *store.named)
    assert store.ids() == {9}


def test_what_is_redriven_without_a_system_is_delivered_when_it_starts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seen: list[Envelope[Any]] = []

    async def live(fails: bool, tries: int, *payloads: int) -> None:
        async with store.engine(seen, fails=fails) as engine:
            for payload in payloads:
                await engine.publish(TOPIC, Envelope(payload, "OrderPlaced"), durable=True)
            async with asyncio.timeout(10):
                while len(seen) < tries or any(one.lag for one in engine.journal.statuses()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # A journal has no event for that.

    asyncio.run(live(True, 4, 1, 2))
    first, second = json.loads(output_of("list", *store.named, "--json"))["letters"]
    seen.clear()

    shown = output_of("redrive", *store.named, "--id", first["message_id"])
    asyncio.run(live(False, 1))

    assert "1 dead letter redriven, to be delivered when the system starts." in shown
    assert [(str(one.message_id), one.attempt) for one in seen] == [(first["message_id"], 3)]
    assert store.ids() == {UUID(second["message_id"]).int}


def test_what_nobody_would_ever_get_is_not_redriven(store: Store) -> None:
    done = run("redrive", *store.named, "--yes")

    assert isinstance(done.exception, InvalidState)
    assert "The journal has no place for 'audit'" in str(done.exception)
    assert store.ids() == {1, 2, 3}


def test_a_server_may_be_in_use_unseen_so_that_one_has_to_agree(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = letter_box.JournalBox

    def warned(url: str, name: str) -> letter_box.JournalBox:
        box = real(url, name)
        box.warning = real("nats://localhost:4222", name).warning
        monkeypatch.setattr(box, "redrivable", lambda letters: letters)
        return box

    monkeypatch.setattr(letter_box, "JournalBox", warned)

    done = run("redrive", *store.named, "--error", "ValueError")

    assert isinstance(done.exception, InvalidParameter)
    assert "No system may run with this journal" in str(done.exception)
    assert store.ids() == {1, 2, 3}
    output_of("redrive", *store.named, "--error", "ValueError", "--yes")
    assert store.ids() == {1, 3}


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list",), "Name the system: raydispatch dead-letters list orders."),
        (("list", "orders", "--name", "shop"), "'orders' or 'shop': name one system."),
        (("list", "orders", "--since", "yesterday"), "--since cannot be 'yesterday'"),
        (("list", "orders", "--until", "2026-13-01"), "--until cannot be '2026-13-01'"),
        (("list", "orders", "--since", "1h", "--until", "2h"), "Nothing is between --since 1h and --until 2h"),
        (("list", "orders", "--id", "7"), "'7' is no message id"),
        (("show", "orders"), "'orders' is no message id"),
        (("show", "orders", str(FIRST_ID), str(SECOND_ID)), "Give one message's id"),
        (("purge", "orders"), "no terminal to ask on"),
        (("list", "orders", "--journal", "ftp://here"), "A journal is at sqlite:///path/to/file.db"),
    ],
)
def test_mistakes_are_found_before_ray_is(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")

    done = run(*arguments)

    assert isinstance(done.exception, InvalidParameter)
    assert words in str(done.exception)


def test_a_journal_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    done = run("list", "orders", "--journal", f"sqlite://{tmp_path / 'odrers.db'}")

    assert isinstance(done.exception, InvalidParameter)
    assert "There is no journal" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_journal_of_another_name_is_refused(store: Store) -> None:
    done = run("list", "shop", "--journal", store.url)

    assert "holds the journal 'orders', not 'shop'" in str(done.exception)


def test_a_journal_in_use_belongs_to_a_system_that_should_be_named(store: Store) -> None:
    journal = asyncio.run(open_journal(store.url, "orders"))

    done = run("list", *store.named)
    asyncio.run(journal.close())

    assert isinstance(done.exception, JournalUnavailable)
    assert "in use by another process" in str(done.exception)
    assert "name that, without --journal: raydispatch dead-letters list orders" in str(done.exception)


@pytest.mark.parametrize("verb", ["list", "show", "redrive", "purge"])
def test_each_command_has_help_with_an_example(verb: str) -> None:
    shown = output_of(verb, "--help")

    assert f"For example: raydispatch dead-letters {verb} orders" in shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("30m", 1_800), ("1.5h", 5_400), ("7d", 604_800), (" 2 w ", 1_209_600)]
)
def test_a_moment_can_be_told_by_how_long_ago_it_was(text: str, seconds: float) -> None:
    assert datetime.now(UTC) - moment("--since", text) == pytest.approx(
        timedelta(seconds=seconds), abs=timedelta(seconds=5)
    )


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2y", "999999999999d", "0001-01-01T00:00+14:00"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="--since cannot be"):
        moment("--since", text)


# On a system


class FakeSystem:
    """With a journal, or with a memory only."""

    def __init__(self, letters: Sequence[DeadLetter], *, has_journal: bool) -> None:
        self.letters = letters
        self.has_journal = has_journal
        self.purged: dict[str, Any] = {}

    def dead_letters(self, **wanted: Any) -> list[DeadLetter]:
        return [letter for letter in self.letters if LetterFilter(**wanted).takes(letter)]

    def redrive(self, dispatcher_id: str | None = None, **wanted: Any) -> int:
        if not self.has_journal:
            raise InvalidState("The engine has no journal")
        return len(self.dead_letters(dispatcher_id=dispatcher_id, **wanted))

    def purge_dead_letters(self, **wanted: Any) -> int:
        self.purged = wanted
        return len(self.dead_letters(**wanted))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def test_letters_in_memory_can_be_seen_but_not_redriven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_box, "attach", lambda name: FakeSystem(LETTERS, has_journal=False))

    assert str(FIRST_ID) in output_of("list", "orders")
    assert "no answer" in output_of("show", "orders", str(FIRST_ID))
    for verb in ("redrive", "purge"):
        for option in ("--yes", "--dry-run"):
            done = run(verb, "orders", option)
            assert isinstance(done.exception, InvalidState)
            assert "'orders' has no journal" in str(done.exception)
            assert "raydispatch deploy … --journal" in str(done.exception)


def test_what_is_in_memory_beside_a_journal_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeSystem([*LETTERS, letter_of(UUID(int=4), payload=object())], has_journal=True)
    monkeypatch.setattr(letter_box, "attach", lambda name: system)

    shown = output_of("purge", "orders", "--dispatcher", "billing")

    assert "1 dead letter in memory stay" in shown
    assert system.purged["dispatcher_id"] == "billing"
    assert system.purged["until"] == NOON + timedelta(hours=1, microseconds=1)


SHOP = """
from pathlib import Path
from raydispatch import DispatchEngine, Envelope, MessageCategory, RetrySettings

engine = DispatchEngine("shop")

@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, breaker=None,
                   retry=RetrySettings(tries=2, first_delay_seconds=0))
async def bill(envelope: Envelope[int]) -> None:
    if envelope.payload < 0:
        raise ValueError("a negative total")
    if not Path("BANK").exists():
        raise ConnectionError("no bank")
"""
NAME = "shop-with-letters"


@pytest.fixture
def deployed(tmp_path: Path, ray_cluster: None) -> Iterator[Path]:
    """The shop on Ray, deployed with a journal by a command that has ended."""
    import ray

    from raydispatch.actors import DispatchSystem

    (tmp_path / "shop.py").write_text(SHOP.replace("BANK", str(tmp_path / "bank")))
    address = ray.get_runtime_context().gcs_address
    options = ("--name", NAME, "--routers", "1", "--journal", "sqlite:shop.db")
    done = raydispatch(tmp_path, address, "deploy", "shop:engine", *options)
    assert done.returncode == 0, done.stderr
    yield tmp_path
    with suppress(DispatchError):
        DispatchSystem.attach(NAME).stop(0)


@pytest.mark.slow
def test_on_ray_letters_are_listed_shown_redriven_and_purged(deployed: Path) -> None:
    from tests.actors.helping import wait_until

    from raydispatch.actors import DispatchSystem

    with DispatchSystem.attach(NAME) as system:
        orders = [(TOPIC, Envelope(number, "OrderPlaced", key=f"k{number}")) for number in (-1, 1, 2)]
        system.publish_many(orders, durable=True)
        wait_until(lambda: system.status().dead_letters == 3)
        status = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["status", NAME])
        row = next(line.split() for line in status.output.splitlines() if "reliable_shared" in line)
        assert row[:2] == ["billing", "reliable_shared"]
        assert row[-1] == "3"

        assert "ConnectionError" in output_of("list", NAME)
        letters = json.loads(output_of("list", NAME, "--error", "ConnectionError", "--json"))["letters"]
        assert {letter["payload"] for letter in letters} == {1, 2}
        shown = output_of("show", NAME, letters[0]["message_id"])
        assert "ConnectionError: no bank" in shown
        in_use = raydispatch(deployed, "nowhere", "dead-letters", "list", NAME, "--journal", "sqlite:shop.db")
        assert in_use.returncode == 2
        assert f"dead-letters list {NAME}" in in_use.stderr

        (deployed / "bank").touch()
        assert "2 dead letters to redrive" in output_of("redrive", NAME, "--error", "ConnectionError", "--dry-run")
        assert "2 dead letters redriven" in output_of("redrive", NAME, "--error", "ConnectionError")
        wait_until(lambda: system.status().dead_letters == 1 and not system.status().subscriptions[0].lag)
        assert "1 dead letter purged" in output_of("purge", NAME, "--since", "1h")
        assert system.dead_letters() == []
        assert system.stop(5)

    done = raydispatch(deployed, "nowhere", "dead-letters", "list", NAME, "--journal", "sqlite:shop.db")
    assert done.returncode == 0
    assert "There are no dead letters." in done.stdout


@pytest.mark.slow
def test_a_system_without_a_journal_says_what_to_do(ray_cluster: None) -> None:
    from raydispatch.actors import DispatchSystem

    engine = DispatchEngine("letters-in-memory")

    @engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, retry=None)
    async def bill(envelope: Envelope[Any]) -> None:
        raise ConnectionError("no bank")

    with DispatchSystem.start(engine, routers=1) as system:
        system.dispatch(TOPIC, Envelope(1, "OrderPlaced"))

        assert "ConnectionError" in output_of("list", engine.name)
        done = run("redrive", engine.name, "--yes")
        assert isinstance(done.exception, InvalidState)
        assert "has no journal" in str(done.exception)
