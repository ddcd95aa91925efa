import pytest

from raydispatch.dispatch.retry import retry_delay
from raydispatch.settings import RetrySettings


def highest(_: float, ceiling: float) -> float:
    return ceiling


def lowest(floor: float, _: float) -> float:
    return floor


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 0.5), (2, 1.5), (3, 4.5), (4, 10.0), (100, 10.0)])
def test_the_longest_wait_grows_up_to_its_limit(attempt: int, seconds: float) -> None:
    chosen = RetrySettings(first_delay_seconds=0.5, factor=3, max_delay_seconds=10)

    assert retry_delay(chosen, attempt, uniform=highest) == seconds


def test_the_shortest_wait_is_none() -> None:
    assert retry_delay(RetrySettings(), 5, uniform=lowest) == 0.0


def test_waits_are_spread_between_nothing_and_the_limit() -> None:
    chosen = RetrySettings(first_delay_seconds=2.0)

    waits = {retry_delay(chosen, 1) for _ in range(50)}

    assert len(waits) > 1
    assert all(0.0 <= wait <= 2.0 for wait in waits)
