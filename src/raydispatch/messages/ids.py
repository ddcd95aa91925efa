"""Random ids, drawn in blocks: every message needs two, and `uuid4` would take a fifth of its whole time."""

import os
from struct import Struct
from uuid import UUID

_BLOCK = 512
_VERSION_4 = 0x4 << 76 | 0x2 << 62
_RANDOM_BITS = 2**128 - 1 ^ (0xF << 76 | 0x3 << 62)
_UNKNOWN = UUID(int=0).is_safe

# The setters of its slots, found once: 0.1 µs for each id that `object.__setattr__` would take to look them up.
_set_number, _set_safety = (vars(UUID)[name].__set__ for name in ("int", "is_safe"))
_split = Struct("16s" * _BLOCK).unpack

_pool: list[int] = []


def new_id() -> UUID:
    """A random UUID (version 4) from the operating system's generator; safe in threads and after a fork."""
    while True:
        try:
            # list.pop is atomic, so that no two threads can draw the same number.
            return uuid_of(_pool.pop() & _RANDOM_BITS | _VERSION_4)
        except IndexError:
            _pool.extend(_draw_block())


def uuid_of(number: int) -> UUID:
    """Build a UUID without the checks of its constructor, which are most of its cost."""
    uuid = object.__new__(UUID)
    _set_number(uuid, number)
    _set_safety(uuid, _UNKNOWN)
    return uuid


def _draw_block() -> list[int]:
    # No loop in Python, which would take twice as long for each id as all the rest.
    return list(map(int.from_bytes, _split(os.urandom(16 * _BLOCK))))


# A forked child would otherwise hand out the ids that its parent hands out.
os.register_at_fork(after_in_child=_pool.clear)
