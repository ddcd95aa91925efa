from typing import Any

import pytest
from pydantic import ValidationError

from raydispatch.settings import (
    BackpressureSettings,
    BackpressureStrategy,
    BreakerSettings,
    EngineSettings,
    RetrySettings,
    Settings,
)


@pytest.mark.parametrize("kind", [BreakerSettings, RetrySettings, EngineSettings, BackpressureSettings])
def test_unknown_names_are_refused(kind: type[Settings]) -> None:
    with pytest.raises(ValidationError, match="surprise"):
        kind.model_validate({"surprise": 1})


def test_settings_do_not_change_after_birth() -> None:
    chosen: Any = BreakerSettings()

    with pytest.raises(ValidationError, match="frozen"):
        chosen.failure_threshold = 1


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (BreakerSettings, {"failure_threshold": 0}),
        (BreakerSettings, {"reset_after_seconds": 0}),
        (BreakerSettings, {"window_seconds": float("inf")}),
        (BreakerSettings, {"trial_successes": 0}),
        (RetrySettings, {"tries": 0}),
        (RetrySettings, {"tries": 101}),
        (RetrySettings, {"factor": 0.5}),
        (RetrySettings, {"max_delay_seconds": float("nan")}),
        (EngineSettings, {"max_payload_bytes": 0}),
        (EngineSettings, {"dead_letters": -1}),
        (EngineSettings, {"batch_size": 0}),
        (EngineSettings, {"stop_seconds": float("inf")}),
        (EngineSettings, {"backpressure": {"capacity": 0}}),
        (BackpressureSettings, {"strategy": "hope"}),
        (BackpressureSettings, {"high_mark": 1.1}),
        (BackpressureSettings, {"low_mark": 0.8}),
        (BackpressureSettings, {"rate_factor": 1}),
    ],
)
def test_values_that_make_no_sense_are_refused(kind: type[Settings], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(values)


def test_the_environment_that_is_handed_over_is_read() -> None:
    chosen = EngineSettings.from_environment({"RAYDISPATCH_MAX_PAYLOAD_BYTES": "12", "RAYDISPATCH_OTHER": "x"})

    assert chosen == EngineSettings(max_payload_bytes=12)


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDISPATCH_DEAD_LETTERS", "3")

    assert EngineSettings.from_environment().dead_letters == 3


def test_settings_inside_of_settings_are_read_by_their_longer_names() -> None:
    chosen = EngineSettings.from_environment(
        {
            "RAYDISPATCH_BACKPRESSURE_CAPACITY": "12",
            "RAYDISPATCH_BACKPRESSURE_STRATEGY": "drop_oldest",
            "RAYDISPATCH_BATCH_WAIT_SECONDS": "0.5",
        }
    )

    backpressure = BackpressureSettings(strategy=BackpressureStrategy.DROP_OLDEST, capacity=12)
    assert chosen == EngineSettings(backpressure=backpressure, batch_wait_seconds=0.5)


def test_an_environment_without_any_of_them_gives_the_defaults() -> None:
    assert EngineSettings.from_environment({"PATH": "/bin", "RAYDISPATCH_BACKPRESSURE": "x"}) == EngineSettings()


@pytest.mark.parametrize(
    "environment", [{"RAYDISPATCH_BACKPRESSURE_CAPACITY": "many"}, {"RAYDISPATCH_BACKPRESSURE_LOW_MARK": "0.9"}]
)
def test_values_of_the_environment_that_make_no_sense_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="backpressure"):
        EngineSettings.from_environment(environment)
