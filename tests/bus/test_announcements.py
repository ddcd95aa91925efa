import dataclasses
import pickle
from uuid import uuid4

import pytest

from raydispatch.bus.announcements import (
    COMMAND_RESULT,
    COMMAND_STARTED,
    SESSION_ENDED,
    SESSION_STARTED,
    CommandResult,
    CommandStarted,
    SessionEnded,
    SessionStarted,
)
from raydispatch.dispatch.outcome import DispatchStatus
from raydispatch.messages.topic import MessageCategory

ANNOUNCEMENTS = [
    CommandStarted(uuid4(), "dev.stock.commands", "Take"),
    CommandResult(uuid4(), "dev.stock.commands", "Take", DispatchStatus.TIMEOUT, 12.5, "too slow"),
    SessionStarted("job-1"),
    SessionEnded("job-1", "KeyError"),
]


@pytest.mark.parametrize("topic", [COMMAND_STARTED, COMMAND_RESULT, SESSION_STARTED, SESSION_ENDED])
def test_all_topics_are_those_of_events(topic: str) -> None:
    assert MessageCategory.from_topic(topic) is MessageCategory.EVENT
    assert topic.startswith("raydispatch.")


@pytest.mark.parametrize("announcement", ANNOUNCEMENTS, ids=lambda one: type(one).__name__)
def test_announcements_survive_the_wire_and_never_change(announcement: object) -> None:
    assert pickle.loads(pickle.dumps(announcement)) == announcement
    for field in dataclasses.fields(announcement):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(announcement, field.name, None)
