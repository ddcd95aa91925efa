"""The demo: its parts, the one in this process, and the one on Ray as a newcomer runs it."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from raydispatch.cli.demo import night
from raydispatch.cli.demo.ledger import Ledger
from raydispatch.cli.demo.screen import Screen
from raydispatch.cli.demo.shop import MailServer, build_shop, customer, everyday, order
from raydispatch.cli.main import app
from raydispatch.dispatch.outcome import DispatchResult, DispatchStatus

if TYPE_CHECKING:
    from raydispatch.actors.system import DispatchSystem


def shown(ledger: Ledger) -> str:
    console = Console(file=StringIO(), width=120)
    with console.capture() as captured:
        ledger.show(console)
    return captured.get()


def result_of(number: int, mail_port: int = 0) -> DispatchResult:
    async def run() -> DispatchResult:
        async with build_shop(mail_port) as engine:
            return await engine.dispatch(*everyday(number))

    return asyncio.run(run())


def entries_and_sent(text: str) -> tuple[list[int], int, int]:
    """The numbers of the line with the sum."""
    line = re.search(r"([\d, +]+) = ([\d,]+) entries, for ([\d,]+) messages sent", text)
    assert line, text
    counts, total, sent = (part.replace(",", "") for part in line.groups())
    return [int(count) for count in counts.split("+")], int(total), int(sent)


def test_the_ledger_adds_up_when_each_message_has_its_result() -> None:
    ledger = Ledger()

    for number, _ in enumerate(ledger.outgoing(map(everyday, range(5)))):
        ledger.enter(result_of(number))

    assert entries_and_sent(shown(ledger)) == ([1, 1, 2, 1], 5, 5)
    assert ledger.adds_up
    assert "every message has its entry" in shown(ledger)


def test_a_ledger_with_a_result_missing_says_so() -> None:
    ledger = Ledger()

    for _ in ledger.outgoing([order(1), order(2)]):
        pass
    ledger.enter(result_of(4))

    assert not ledger.adds_up
    assert "that does not add up" in shown(ledger)


@pytest.fixture
def mail() -> Iterator[MailServer]:
    with MailServer() as server:
        yield server


def test_mails_fail_until_the_server_is_repaired(mail: MailServer) -> None:
    async def run() -> tuple[DispatchResult, DispatchResult]:
        async with build_shop(mail.port) as engine:
            before = await engine.dispatch(*customer(1))
            mail.repair()
            return before, await engine.dispatch(*customer(2))

    before, after = asyncio.run(run())

    assert before.status is DispatchStatus.DISPATCHER_ERROR
    assert after.status is DispatchStatus.SUCCESS


def test_the_demo_in_this_process_shows_every_kind_of_end() -> None:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--local", "--messages", "2000"])

    assert done.exit_code == 0, done.output
    for status in ("success", "invalid_message", "no_dispatcher", "circuit_open", "dispatcher_error"):
        assert status in done.output
    counts, total, sent = entries_and_sent(done.output)
    assert sum(counts) == total == sent == 2000
    assert "hunter2" not in done.output


def test_the_demo_wants_a_message_at_least() -> None:
    assert CliRunner().invoke(app, ["demo", "--messages", "0"]).exit_code == 2


def test_without_spark_the_demo_says_in_a_line_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night, "has_spark", lambda: False)
    console = Console(file=StringIO(), width=120)

    with console.capture() as captured:
        assert night.route_orders(Screen(console), console, cast("DispatchSystem", None))

    assert "Left out. Spark on Ray is not installed: pip install 'raydispatch[spark]'." in captured.get()


@pytest.mark.slow
def test_the_demo_on_ray_tells_its_story_and_adds_up() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raydispatch", "demo", "--messages", "1000"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    story = [
        "the shop is open", "1. Routing", "1,000 messages done", "2. A circuit breaker", "the circuit is open",
        "the mail server is repaired", "the circuit is closed", "3. Scaling under load", "scaled to 3 replicas",
        "The ledger", "4. A DataFrame", "200,000 orders done", "The ledger of the DataFrame", "195,800", "Row order-1:",
        "every row has its entry", "are gone",
    ]  # fmt: skip
    places = [done.stdout.find(words) for words in story]
    assert -1 not in places, story[places.index(-1)]
    assert places == sorted(places)
    counts, total, sent = entries_and_sent(done.stdout)
    assert sum(counts) == total == sent > 1000
    assert "hunter2" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_its_ray() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "raydispatch", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "1. Routing" in line:
                break
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=60)

    assert demo.returncode == 130, errors
    assert "everything that the demo started is gone" in rest
    # Ray names its session after the process that began it.
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in processes.splitlines() if re.search(rf"/session_\S+_{demo.pid}/", line)]
