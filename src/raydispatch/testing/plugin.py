"""Fixtures for pytest. In your conftest.py: `pytest_plugins = ["raydispatch.testing.plugin"]`."""

from typing import Any, Protocol

import pytest

from raydispatch.bus.engine import DispatchEngine
from raydispatch.testing.clock import FakeClock
from raydispatch.testing.doubles import double
from raydispatch.testing.faults import FaultInjector


class MakeDouble(Protocol):
    """What the fixture `make_double` gives."""

    def __call__(self, engine: DispatchEngine, **options: Any) -> DispatchEngine:
        """As `raydispatch.testing.double`."""


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that stands still; `make_double` and `faults` go by it in a test that asks for it."""
    return FakeClock()


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> FaultInjector:
    """A fault injector without rules; `make_double` puts it around the handlers in a test that asks for it."""
    return FaultInjector(seed=7, clock=_asked_for(request, "fake_clock"))


@pytest.fixture
def make_double(request: pytest.FixtureRequest) -> MakeDouble:
    """Makes doubles of engines, with the clock and the faults of this test."""

    def make(engine: DispatchEngine, **options: Any) -> DispatchEngine:
        chosen = {"clock": _asked_for(request, "fake_clock"), "faults": _asked_for(request, "faults"), **options}
        return double(engine, **chosen)

    return make


def _asked_for(request: pytest.FixtureRequest, name: str) -> Any:
    # Only then: on a clock that nobody moves, the first pause between two tries would never end.
    return request.getfixturevalue(name) if name in request.fixturenames else None
