"""A moment, as people write it: 2026-03-01T12:00, or how long ago."""

import re
from datetime import UTC, datetime, timedelta

from raydispatch.errors import InvalidParameter

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(option: str, text: str) -> datetime:
    """The moment that an option names. A time without a zone is one of this machine's."""
    ago = _AGO.fullmatch(text.strip())
    try:
        if ago is not None:
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidParameter(
            f"{option} cannot be {text!r}: give a time, such as 2026-03-01 or 2026-03-01T12:00+01:00, or how long ago "
            "it was, such as 30m, 2h, 7d."
        ) from None
