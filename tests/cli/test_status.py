"""`status`, `top`, `scale` and `down`, on a system that is only made up."""

import json
from typing import Any

import pytest
from rich.console import Console
from tests.cli.fakes import FakeSystem, status_of, subscription_of
from typer.testing import CliRunner

from raydispatch.cli import down, scale, status, top
from raydispatch.cli.main import app
from raydispatch.cli.status import Look, Watch, drawn
from raydispatch.dispatch.breaker import CircuitState
from raydispatch.errors import NotRegistered


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    fake = FakeSystem()
    for command in (status, top, scale, down):
        monkeypatch.setattr(command, "attach", lambda name: fake)
    for command in (status, top):
        monkeypatch.setattr(command, "sleep", lambda seconds: None)
    return fake


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def text_of(look: Look, width: int = 80) -> str:
    console = Console(width=width, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(drawn(look))
    return captured.get()


def test_status_shows_the_sums_of_all_replicas(system: FakeSystem) -> None:
    shown = run("status", "shop")

    assert shown.exit_code == 0, shown.output
    row = next(line.split() for line in shown.output.splitlines() if line.startswith("billing"))
    assert row[:5] == ["billing", "closed", "1", "7", "3"]
    assert row[5] == "20"
    assert row[7] == "2"
    assert not system.is_open


def test_the_table_fits_into_80_characters() -> None:
    text = text_of(Look(status_of(12_345_678), 123_456.0, {"billing": 123_456.0}))

    for heading in ("dispatcher", "circuit", "replicas", "in flight", "queue", "handled", "per s", "restarts"):
        assert heading in text
    assert "12,345,678" in text
    assert "…" not in text


def test_a_router_that_is_away_and_an_open_circuit_are_seen() -> None:
    text = text_of(Look(status_of(circuit=CircuitState.OPEN), 0.0, {"billing": 0.0}))

    assert "open" in text
    assert next(line for line in text.splitlines() if "router-2" in line).split()[1] == "away"


def test_subscriptions_are_shown_if_there_are_any() -> None:
    plain = status_of()
    status = plain.model_copy(
        update={"subscriptions": (subscription_of("feed", reliable=False), subscription_of("billing"))}
    )

    text = text_of(Look(status, 0.0, {"billing": 0.0}))
    lines = text.splitlines()

    start = next(number for number, line in enumerate(lines) if line.startswith("name"))
    assert [line.split() for line in lines[start + 2 : start + 4]] == [
        ["billing", "reliable_key_shared", "12,345,678", "64", "1,000", "17", "5"],
        ["feed", "key_shared", "12,345,678", "64", "1,000", "17", "5"],
    ]
    assert "…" not in text
    assert "given up" not in text_of(Look(plain, 0.0, {"billing": 0.0}))


def test_status_as_json_has_the_sums_beside_the_parts(system: FakeSystem) -> None:
    content = json.loads(run("status", "shop", "--json").output)

    billing = content["dispatchers"]["billing"]
    assert (billing["in_flight"], billing["queue"], billing["handled"], billing["restarts"]) == (7, 3, 20, 2)
    assert billing["replicas"][0]["replica_id"] == "billing-1"
    assert content["table_version"] == "abc"
    assert content["messages_per_second"] > 0


def test_rates_are_those_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0])
    monkeypatch.setattr(status, "monotonic", lambda: next(times))
    watch = Watch(FakeSystem())  # type: ignore[arg-type]

    first, second = watch.look(), watch.look()

    assert first.messages_per_second == 0
    assert second.messages_per_second == 5
    assert second.handled_per_second == {"billing": 5}


def test_no_rate_is_below_zero_when_an_actor_begins_to_count_anew() -> None:
    system = FakeSystem()
    watch = Watch(system)  # type: ignore[arg-type]
    system.looks = 100

    watch.look()
    system.looks = 0

    assert watch.look().messages_per_second == 0


def test_top_once_is_one_picture(system: FakeSystem) -> None:
    shown = run("top", "shop", "--once")

    assert shown.exit_code == 0, shown.output
    assert shown.output.count("billing") == 1


def test_top_goes_on_until_ctrl_c_which_is_no_error(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        if system.looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "sleep", wait)

    shown = run("top", "shop")

    assert shown.exit_code == 0, shown.output
    assert system.looks == 3
    assert not system.is_open


def test_scale_tells_before_and_after(system: FakeSystem) -> None:
    shown = run("scale", "shop", "billing", "3")

    assert "billing: 1 → 3 replicas" in shown.output


def test_scale_knows_the_dispatchers(system: FakeSystem) -> None:
    shown = run("scale", "shop", "bilding", "3")

    assert isinstance(shown.exception, NotRegistered)
    assert system.replicas == 1


@pytest.mark.parametrize("replicas", ["0", "-1", "many"])
def test_scale_wants_a_number_above_zero(replicas: str) -> None:
    shown = run("scale", "shop", "billing", "--", replicas)

    assert shown.exit_code == 2
    assert "replicas" in shown.output.lower()


def test_down_tells_that_all_was_done(system: FakeSystem) -> None:
    shown = run("down", "shop", "--seconds", "5")

    assert shown.exit_code == 0
    assert "everything was done in time" in shown.output
    assert system.stopped_within == 5


def test_down_fails_when_the_time_was_too_short(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down, "attach", lambda name: FakeSystem(drains=False))

    shown = run("down", "shop", "--seconds", "1.5")

    assert shown.exit_code == 1
    assert "not everything was done within 1.5 s" in shown.output


@pytest.mark.parametrize("command", ["deploy", "status", "top", "scale", "down", "demo"])
def test_every_command_has_help_and_shows_it_without_ray(command: str) -> None:
    shown = run(command, "--help")

    assert shown.exit_code == 0
    assert "Usage" in shown.output
