from typing import Any

import pytest
from pydantic import ValidationError

from raydispatch.settings import BreakerSettings, EngineSettings, RetrySettings, Settings


@pytest.mark.parametrize("kind", [BreakerSettings, RetrySettings, EngineSettings])
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
