"""How long to wait before the next try."""

import random
from collections.abc import Callable

from raydispatch.settings import RetrySettings


def retry_delay(
    settings: RetrySettings, attempt: int, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Seconds to wait after this attempt (1, 2, …) failed: anything from nothing to an exponentially growing limit.

    Full jitter: messages that failed together do not come back together.
    """
    try:
        ceiling = min(settings.max_delay_seconds, settings.first_delay_seconds * settings.factor ** (attempt - 1))
    except OverflowError:  # After a thousand tries.
        ceiling = settings.max_delay_seconds
    return uniform(0.0, ceiling)
