"""What you need to test your own dispatchers: in one process, without Ray, and without waiting."""

from raydispatch.testing.clock import FakeClock
from raydispatch.testing.doubles import double
from raydispatch.testing.faults import AckLost, FaultInjector
from raydispatch.testing.handlers import FailingHandler, RecordingHandler
from raydispatch.testing.rules import FaultRule

__all__ = [  # noqa: RUF022 - in the order of the story
    # Your engine, to play with
    "double",
    "FakeClock",
    # In the place of your handlers
    "RecordingHandler",
    "FailingHandler",
    # Around your handlers
    "FaultInjector",
    "FaultRule",
    "AckLost",
]
