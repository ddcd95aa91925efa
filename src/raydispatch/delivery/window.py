"""The window: what a subscription has taken from the journal and not settled yet, and the cursor that follows."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from raydispatch.delivery.segment import FORMAT, unpacked
from raydispatch.errors import JournalCorrupt


class Cursor(NamedTuple):
    """How far a subscription is, as it is kept: everything before `position` is settled, but what is open."""

    position: int = 0
    open: Sequence[tuple[int, int, int]] = ()
    """What is not settled: offset, tries that failed, and deliveries whose end nobody heard of."""
    may_have_run: int = 0
    """From `position` up to here, messages may have been delivered before: the next time is not their first."""

    def pack(self) -> bytes:
        """As bytes."""
        data: bytes = msgpack.packb((FORMAT, *self))
        return data

    @classmethod
    def unpack(cls, data: bytes) -> "Cursor":
        """From bytes."""
        position, pairs, may_have_run = unpacked(data, "cursor", len(cls._fields))
        try:
            return cls(
                int(position), tuple((int(one), int(two), int(three)) for one, two, three in pairs), int(may_have_run)
            )
        except (TypeError, ValueError):
            raise JournalCorrupt("A cursor in the journal holds something that is no number.") from None

    @property
    def is_exact(self) -> bool:
        """Whether it was kept while nobody could be given anything: then what is open was not out since."""
        return self.may_have_run <= self.position


class Window:
    """Offsets are taken in ascending order and settled in any; the safe cursor never passes one that is open.

    Example: `window.take(7)`, and later `window.settle(7)`.
    """

    def __init__(self, cursor: Cursor | None = None, head: int | None = None) -> None:
        cursor = cursor or Cursor()
        self.position = cursor.position
        """The next offset to take."""
        self._tries = {offset: tries for offset, tries, _ in cursor.open}
        # What is open was delivered by somebody who is gone now, or may have been.
        again = 0 if cursor.is_exact else 1
        self._unheard = {offset: unheard + again for offset, _, unheard in cursor.open if unheard + again}
        self._in_order = deque(sorted(self._tries))
        """All that is open, and some that is settled already: the front is put right when somebody asks."""
        most = cursor.may_have_run if head is None else min(cursor.may_have_run, head)
        # What is not in the log yet cannot have been delivered.
        self._may_have_run = max(most, cursor.position)
        self._reserved = 0 if cursor.is_exact else self._may_have_run

    def take(self, offset: int) -> None:
        """Open this one; those before it that were not taken are none of ours, and count as settled."""
        if offset < self.position:
            raise ValueError(f"offset {offset} was passed already: the window is at {self.position}")
        self.position = offset + 1
        self._tries[offset] = 0
        if offset < self._may_have_run:
            self._unheard[offset] = 1
        self._in_order.append(offset)

    def pass_to(self, position: int) -> None:
        """Nothing before this is ours any more, but what is open."""
        self.position = max(self.position, position)

    def settle(self, offset: int) -> bool:
        """It is done, or given up; False if it was settled before."""
        if self._unheard:
            self._unheard.pop(offset, None)
        return self._tries.pop(offset, None) is not None

    def tried(self, offset: int) -> int:
        """It was tried, and failed; how often that makes."""
        self._tries[offset] += 1
        return self._tries[offset]

    def deliveries(self, offset: int) -> int:
        """How often it was delivered before, as far as can be known: tries, and those whose end nobody heard of."""
        return self._tries.get(offset, 0) + (self._unheard.get(offset, 0) if self._unheard else 0)

    def unheard(self, offset: int) -> None:
        """It was delivered, and whoever had it is gone."""
        self._unheard[offset] = self._unheard.get(offset, 0) + 1

    def is_open(self, offset: int) -> bool:
        """Whether it was taken and is not settled."""
        return offset in self._tries

    @property
    def open(self) -> list[int]:
        """What is open, in order."""
        return sorted(self._tries)

    @property
    def safe(self) -> int:
        """Everything before this is settled."""
        while self._in_order and self._in_order[0] not in self._tries:
            self._in_order.popleft()
        return self._in_order[0] if self._in_order else self.position

    def covers(self, offset: int) -> bool:
        """Whether the cursor that was kept last says that this one may have been delivered."""
        return offset < self._reserved

    def cursor(self, ahead: int = 0) -> Cursor:
        """What to keep; with room to deliver so many more before it has to be kept again."""
        open_now = [(offset, tries, self._unheard.get(offset, 0)) for offset, tries in self._tries.items()]
        return Cursor(self.position, open_now, max(self.position + ahead, self._may_have_run))

    def keeping(self, cursor: Cursor) -> None:
        """This one is on its way into the journal: until it is there, that and the last one may be what counts."""
        self._reserved = min(self._reserved, 0 if cursor.is_exact else cursor.may_have_run)

    def kept(self, cursor: Cursor) -> None:
        """This one is safe in the journal now."""
        self._reserved = 0 if cursor.is_exact else cursor.may_have_run

    def __len__(self) -> int:
        return len(self._tries)
