"""Time, as something that can be handed over: tests hand over a fake."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What breakers and retries know of time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The real one."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)
