"""`deploy` and what follows, on a real Ray."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raydispatch import Envelope
from raydispatch.cli.deploy import _with_journal
from raydispatch.cli.main import app
from raydispatch.errors import DispatchError, InvalidParameter, NotRegistered, SystemUnavailable
from raydispatch.settings import EngineSettings, JournalSettings

SHOP = """
import asyncio
from raydispatch import DispatchEngine, Envelope, MessageCategory

engine = DispatchEngine("shop")

@engine.dispatcher("billing", topics="*.order.events.*", category=MessageCategory.EVENT)
async def bill(envelope: Envelope[float]) -> None:
    await asyncio.sleep(envelope.payload)
"""
NAME = "deployed-shop"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def raydispatch(folder: Path, address: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", "raydispatch", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "RAY_ADDRESS": address, "COLUMNS": "120"},
    )


def output_of(*arguments: str) -> str:
    """In this process, which is connected already."""
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shop"], "must read MODULE:ENGINE"),
        (["shpo:engine"], "There is no module 'shpo'"),
        (["shop:engine", "--name", " "], "name must be a string"),
    ],
)
def test_mistakes_in_the_arguments_are_found_before_ray_is(
    shop: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(shop)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")

    done = CliRunner().invoke(app, ["deploy", *arguments])

    assert isinstance(done.exception, InvalidParameter)
    assert words in str(done.exception)


def test_a_journal_that_deploy_names_takes_the_place_of_the_engines_own() -> None:
    own = EngineSettings(batch_size=7, journal=JournalSettings(url="sqlite:///var/shop.db", keep_seconds=60))

    settings = _with_journal(own, "nats://here:4222")
    fresh = _with_journal(EngineSettings(), "sqlite:///var/shop.db")

    assert settings.batch_size == 7
    assert settings.journal == JournalSettings(url="nats://here:4222", keep_seconds=60)
    assert fresh.journal == JournalSettings(url="sqlite:///var/shop.db")


def test_deploy_wants_one_router_at_least() -> None:
    done = CliRunner().invoke(app, ["deploy", "shop:engine", "--routers", "0"])

    assert done.exit_code == 2
    assert "--routers" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["deploy", "shop:engine"], ["status", "shop"]])
def test_without_a_cluster_a_command_says_what_to_do(shop: Path, arguments: list[str]) -> None:
    done = raydispatch(shop, "127.0.0.1:1", *arguments)

    assert done.returncode == 2
    assert "`ray start --head`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def deployed(shop: Path, ray_cluster: None) -> Iterator[str]:
    """The shop on Ray, deployed by a command that has ended."""
    import ray

    from raydispatch.actors import DispatchSystem

    address = ray.get_runtime_context().gcs_address
    done = raydispatch(shop, address, "deploy", "shop:engine", "--name", NAME, "--routers", "1")
    assert done.returncode == 0, done.stderr
    yield done.stdout
    with suppress(DispatchError):
        DispatchSystem.attach(NAME).stop(0)


@pytest.mark.slow
def test_a_system_is_deployed_looked_at_scaled_and_stopped(deployed: str) -> None:
    from raydispatch.actors import DispatchSystem

    assert "billing" in deployed
    assert "router-1" in deployed
    assert f"raydispatch down {NAME}" in deployed

    with DispatchSystem.attach(NAME) as system:
        assert system.dispatch("dev.order.events.v1", Envelope(0.0)).status == "success"
    status = json.loads(output_of("status", NAME, "--json"))
    assert (status["name"], status["has_lease"], len(status["routers"])) == (NAME, False, 1)
    assert status["dispatchers"]["billing"]["handled"] == 1
    assert "billing" in output_of("top", NAME, "--once")

    assert "billing: 1 → 2 replicas" in output_of("scale", NAME, "billing", "2")
    assert len(json.loads(output_of("status", NAME, "--json"))["dispatchers"]["billing"]["replicas"]) == 2
    with pytest.raises(NotRegistered, match="There is no dispatcher 'bilding'"):
        output_of("scale", NAME, "bilding", "2")

    assert "everything was done in time" in output_of("down", NAME)
    for arguments in (["status", NAME], ["top", NAME], ["scale", NAME, "billing", "1"], ["down", NAME]):
        with pytest.raises(SystemUnavailable, match=f"There is no system '{NAME}' on this Ray cluster"):
            output_of(*arguments)


@pytest.mark.slow
def test_down_does_not_wait_longer_than_it_was_told(deployed: str) -> None:
    from tests.actors.helping import wait_until

    from raydispatch.actors import DispatchSystem

    with DispatchSystem.attach(NAME) as system:
        system.publish("dev.order.events.v1", Envelope(60.0))
        wait_until(lambda: system.status().dispatchers["billing"].in_flight == 1)
        done = CliRunner().invoke(app, ["down", NAME, "--seconds", "0.5"])

    assert done.exit_code == 1, done.output
    assert "not everything was done within 0.5 s" in done.output
