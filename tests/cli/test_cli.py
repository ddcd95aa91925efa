"""The command line, as a person and as a program uses it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOP = """
from raydispatch import DispatchEngine, DispatchRoute, Envelope, MessageCategory

engine = DispatchEngine("shop")

@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT, message_types={"OrderPlaced"})
async def bill(envelope: Envelope[object]) -> None: ...

@engine.dispatcher("ship", topics="*.order.commands.**", category=MessageCategory.COMMAND)
async def ship(envelope: Envelope[object]) -> None: ...

engine.register_route(DispatchRoute(route_id="never", topic_pattern="dev.order.commands.v1",
    message_category=MessageCategory.EVENT, dispatcher_id="billing"))

not_an_engine = 7
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def raydispatch(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "raydispatch", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "", "COLUMNS": "160", "PYTHONPATH": str(ROOT / "src")},
    )


def test_routes_are_shown_in_order(shop: Path) -> None:
    shown = raydispatch(shop, "routes", "--app", "shop:engine")

    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.index("never") < shown.stdout.index("billing") or "ship" in shown.stdout
    assert "*.order.commands.**" in shown.stdout


def test_routes_as_json_have_the_version_and_every_route(shop: Path) -> None:
    content = json.loads(raydispatch(shop, "routes", "--app", "shop:engine", "--json").stdout)

    assert len(content["version"]) == 16
    assert [route["route_id"] for route in content["routes"]] == ["never", "billing", "ship"]


def test_explain_says_who_runs_and_why_the_others_do_not(shop: Path) -> None:
    content = json.loads(
        raydispatch(
            shop, "explain", "dev.order.events.v1", "--type", "OrderLost", "--app", "shop:engine", "--json"
        ).stdout
    )

    assert content["selected"] == []
    assert content["passed_over"][0]["reason"] == "its dispatcher takes OrderPlaced only"


def test_explain_draws_a_table(shop: Path) -> None:
    shown = raydispatch(shop, "explain", "dev.order.events.v1", "--type", "OrderPlaced", "--app", "shop:engine")

    assert "runs" in shown.stdout
    assert "billing" in shown.stdout


def test_explain_names_the_fault_of_a_topic_without_category(shop: Path) -> None:
    shown = raydispatch(shop, "explain", "dev.order", "--app", "shop:engine")

    assert "invalid message" in shown.stdout
    assert "did you mean" in shown.stdout


def test_lint_fails_on_a_route_that_can_never_match(shop: Path) -> None:
    shown = raydispatch(shop, "lint", "--app", "shop:engine", "--json")

    assert shown.returncode == 1
    assert [(finding["rule"], finding["subject"]) for finding in json.loads(shown.stdout)] == [("unreachable", "never")]


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("shop", "must read MODULE:ENGINE"),
        ("shpo:engine", "There is no module 'shpo'"),
        ("shop:not_an_engine", "has a int there"),
        ("shop:engin", "has no such name"),
    ],
)
def test_an_engine_that_cannot_be_found_is_a_sentence_and_exit_code_2(shop: Path, app: str, words: str) -> None:
    shown = raydispatch(shop, "routes", "--app", app)

    assert shown.returncode == 2
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr
