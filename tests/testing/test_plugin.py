import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

USERS_TESTS = """
import asyncio

import pytest

from raydispatch import DispatchEngine, MessageCategory, Envelope

pytest_plugins = ["raydispatch.testing.plugin"]

engine = DispatchEngine("orders")


@engine.dispatcher("billing", topics="**", category=MessageCategory.EVENT)
async def bill(envelope: Envelope[object]) -> None: ...


def test_all_three_belong_together(make_double, faults, fake_clock):
    faults.fail(dispatcher="billing", times=2)
    faults.delay(100, dispatcher="billing")
    double = make_double(engine)
    double.freeze()

    result = asyncio.run(fake_clock.run(double.dispatch("a.events", Envelope(1))))

    assert result.outcomes[0].attempts == 3
    assert fake_clock.now() >= 100
    assert faults.counts == {"fail billing": 2, "delay billing": 1}


def test_faults_are_new_for_every_test(faults):
    assert faults.counts == {}


def test_a_clock_that_nobody_asked_for_is_not_used(make_double, faults):
    faults.fail(times=2)
    faults.delay(0.001)
    double = make_double(engine)
    double.freeze()

    assert asyncio.run(double.dispatch("a.events", Envelope(1))).is_successful()


def test_options_are_those_of_double(make_double, fake_clock):
    replaced = make_double(engine, replace={"billing": print}, clock=fake_clock)

    assert replaced.registry.dispatchers()[0].source is print
"""


@pytest.mark.slow
def test_users_get_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_app.py").write_text(USERS_TESTS)

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "error",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            ".",
            "test_app.py",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.slow
def test_without_the_plugin_pytest_is_not_loaded() -> None:
    program = "import sys, raydispatch.testing; print('pytest' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)}
    )

    assert done.stdout.strip() == "False"
