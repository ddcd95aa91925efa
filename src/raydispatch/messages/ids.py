"""Random ids, drawn in blocks: every message needs two, and `uuid4` would take a fifth of its whole time."""

import os
from uuid import UUID

_BLOCK = 512
_VERSION_4 = 0x4 << 76 | 0x2 << 62
_VERSION_BITS = ~(0xF << 76 | 0x3 << 62)

_pool: list[int] = []


def new_id() -> UUID:
    """A random UUID (version 4) from the operating system's generator; safe in threads and after a fork."""
    while True:
        try:
            # list.pop is atomic, so that no two threads can draw the same number.
            return uuid_of(_pool.pop() & _VERSION_BITS | _VERSION_4)
        except IndexError:
            _pool.extend(_draw_block())


def uuid_of(number: int) -> UUID:
    """Build a UUID without the checks of its constructor, which are most of its cost."""
    uuid = object.__new__(UUID)
    object.__setattr__(uuid, "int", number)
    object.__setattr__(uuid, "is_safe", _UNKNOWN)
    return uuid


def _draw_block() -> list[int]:
    drawn = os.urandom(16 * _BLOCK)
    return [int.from_bytes(drawn[i : i + 16], "big") for i in range(0, len(drawn), 16)]


_UNKNOWN = UUID(int=0).is_safe

# A forked child would otherwise hand out the ids that its parent hands out.
os.register_at_fork(after_in_child=_pool.clear)
