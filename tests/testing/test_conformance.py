"""One suite, two runtimes."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from raydispatch import DispatchEngine
from raydispatch.testing.conformance import CHECKS
from raydispatch.testing.runtimes import Start, in_process

Check = Callable[[Start], None]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_one_process(check: Check) -> None:
    check(in_process)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ray(check: Check, ray_cluster: None) -> None:
    from raydispatch.actors import DispatchSystem

    check(DispatchSystem.start)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_runtime_that_does_nothing_passes_no_check(check: Check) -> None:
    @contextmanager
    def broken(engine: DispatchEngine) -> Any:
        class Nothing:
            def __getattr__(self, name: str) -> Any:
                return lambda *_, **__: iter(()) if name == "dispatch_many" else None

        engine.freeze()
        yield Nothing()

    with pytest.raises((AssertionError, AttributeError)):
        check(broken)
