"""Sharing: which consumer gets which message. Three ways, and nothing else of a subscription is in here.

None of them knows of time, offsets or journals: they are told what has come, what is settled and who is there.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from raydispatch.settings import DeliveryMode

MOST_OWNERS = 100_000
"""Keys whose consumer is remembered; it is worked out again in a microsecond."""


@dataclass(slots=True, eq=False)
class Entry:
    """One message on its way from the journal to a consumer."""

    offset: int
    first: int
    """The offset of its batch."""
    key: str | None = None
    is_suspect: bool = False
    """Whether a consumer was lost with it, so that it runs where nothing else does."""
    prefers: str | None = None
    """The seat that it had better come back to, if that is there."""
    failed_at: float | None = None
    """When it failed for the first time, in seconds since 1970."""

    def __lt__(self, other: "Entry") -> bool:
        return self.offset < other.offset


@dataclass(slots=True, eq=False)
class Seat:
    """A consumer's place in a subscription."""

    seat_id: str
    window: int
    is_well: bool = True
    in_flight: int = 0
    has_suspect: bool = False
    is_paused: bool = False
    """It had no room a moment ago. That is no reason to take its place away from it."""
    paused_until: float = 0.0

    @property
    def room(self) -> int:
        """How many more it may have."""
        is_closed = self.has_suspect or self.is_paused or not self.is_well
        return 0 if is_closed else max(0, self.window - self.in_flight)


Share: TypeAlias = tuple[Seat, list[Entry]]


class Sharing(ABC):
    """Messages that wait for a consumer.

    Example: `add` what comes, `share_out` to seats, and tell what became of each: `settled`, `held`, `put_back`.
    """

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """One more, in the order of the journal."""

    @abstractmethod
    def put_back(self, entries: Iterable[Entry]) -> None:
        """These were not done, or their time has come again: they go before all that came later."""

    @abstractmethod
    def share_out(self, seats: Sequence[Seat], most: int, limit: int) -> list[Share]:
        """Who gets what now, up to `most` each and `limit` together; the seats' counts include it at once."""

    @abstractmethod
    def wants_more(self, seats: Sequence[Seat]) -> bool:
        """Whether some consumer would have nothing to do."""

    def settled(self, entry: Entry) -> None:  # noqa: B027 - some have nothing to do
        """It is done, or given up."""

    def held(self, entry: Entry) -> None:  # noqa: B027
        """It failed, and waits for its next try."""

    @abstractmethod
    def __len__(self) -> int: ...


class _Line:
    """Entries in order: what was put back stands before what is new, since it is older."""

    def __init__(self) -> None:
        self._old: list[Entry] = []
        self._new: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        self._new.append(entry)

    def put_back(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._old, entry)

    @property
    def has_old(self) -> bool:
        return bool(self._old)

    def pop_new(self, most: int) -> list[Entry]:
        new = self._new
        return [new.popleft() for _ in range(min(most, len(new)))]

    def peek(self) -> Entry:
        return self._old[0] if self._old else self._new[0]

    def pop(self) -> Entry:
        return heapq.heappop(self._old) if self._old else self._new.popleft()

    def __len__(self) -> int:
        return len(self._old) + len(self._new)


def _fill(seat: Seat, line: _Line, most: int, before: float = math.inf) -> list[Entry]:
    """What a seat takes from the front of a line. A suspect goes alone, to a seat that has nothing else."""
    taken: list[Entry] = []
    room = min(seat.room, most)
    while line and len(taken) < room and line.peek().offset < before:
        if before == math.inf and not line.has_old:
            # Nearly always: nothing that was out before, so that nothing is a suspect.
            taken += line.pop_new(room - len(taken))
            break
        if line.peek().is_suspect:
            if taken or seat.in_flight:
                break
            taken.append(line.pop())
            seat.has_suspect = True
            break
        taken.append(line.pop())
    seat.in_flight += len(taken)
    return taken


class Shared(Sharing):
    """Whoever has least to do takes the next: an even spread, and one that is stuck holds up no more than it has."""

    def __init__(self) -> None:
        self._line = _Line()
        self._bound: dict[str, _Line] = {}
        """Of those that prefer a seat."""

    def add(self, entry: Entry) -> None:
        """See `Sharing`."""
        self._line.add(entry)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """See `Sharing`."""
        for entry in entries:
            line = self._line if entry.prefers is None else self._bound.setdefault(entry.prefers, _Line())
            line.put_back((entry,))

    def share_out(self, seats: Sequence[Seat], most: int, limit: int) -> list[Share]:
        """See `Sharing`."""
        shares: list[Share] = self._to_the_bound(seats, most, limit) if self._bound else []
        limit -= sum(len(taken) for _, taken in shares)
        free = sorted((seat for seat in seats if seat.room), key=lambda seat: seat.in_flight)
        for position, seat in enumerate(free):
            # What is there is divided among those who are left, so that nobody takes it all.
            part = -(-min(len(self._line), limit) // (len(free) - position))
            if taken := _fill(seat, self._line, min(most, part)):
                limit -= len(taken)
                shares.append((seat, taken))
        return shares

    def _to_the_bound(self, seats: Sequence[Seat], most: int, limit: int) -> list[Share]:
        shares: list[Share] = []
        by_id = {seat.seat_id: seat for seat in seats}
        for seat_id, line in list(self._bound.items()):
            seat = by_id.get(seat_id)
            if seat is None or not seat.is_well:  # Then any other will have to do.
                self._line.put_back(line.pop() for _ in range(len(line)))
            elif not seat.is_paused and not seat.has_suspect:
                # Beyond its window, since no handler has to run for these.
                taken = [line.pop() for _ in range(min(len(line), most, limit))]
                seat.in_flight += len(taken)
                limit -= len(taken)
                if taken:
                    shares.append((seat, taken))
            if not line:
                del self._bound[seat_id]
        return shares

    def wants_more(self, seats: Sequence[Seat]) -> bool:
        """See `Sharing`."""
        return len(self) < sum(seat.room for seat in seats)

    def __len__(self) -> int:
        return len(self._line) + sum(map(len, self._bound.values()))


class Exclusive(Sharing):
    """One consumer gets everything, until it is lost; then the next one does. Nothing overtakes what failed."""

    def __init__(self) -> None:
        self._line = _Line()
        self._held: set[int] = set()
        self.active_id: str | None = None

    def add(self, entry: Entry) -> None:
        """See `Sharing`."""
        self._line.add(entry)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """See `Sharing`."""
        entries = list(entries)
        self._held.difference_update(entry.offset for entry in entries)
        self._line.put_back(entries)

    def share_out(self, seats: Sequence[Seat], most: int, limit: int) -> list[Share]:
        """See `Sharing`."""
        active = self.active(seats)
        if active is None or any(seat.in_flight for seat in seats if seat is not active):
            # What another one still has may have been begun, and goes before.
            return []
        taken = _fill(active, self._line, min(most, limit), min(self._held, default=math.inf))
        return [(active, taken)] if taken else []

    def active(self, seats: Sequence[Seat]) -> Seat | None:
        """The one that gets messages now: it stays so while it is well."""
        well = [seat for seat in seats if seat.is_well]
        chosen = next((seat for seat in well if seat.seat_id == self.active_id), well[0] if well else None)
        self.active_id = chosen.seat_id if chosen else self.active_id
        return chosen

    def wants_more(self, seats: Sequence[Seat]) -> bool:
        """See `Sharing`."""
        active = self.active(seats)
        return active is not None and len(self._line) < active.room

    def held(self, entry: Entry) -> None:
        """See `Sharing`."""
        self._held.add(entry.offset)

    def settled(self, entry: Entry) -> None:
        """See `Sharing`."""
        self._held.discard(entry.offset)

    def __len__(self) -> int:
        return len(self._line)


@dataclass(slots=True)
class _KeyState:
    """A key of which a message is under way or held; those behind it wait."""

    waiting: list[Entry] = field(default_factory=list)
    """A heap: the oldest first."""


class KeyShared(Sharing):
    """Every key has its consumer, and one message of a key is under way at a time: its order survives everything.

    A key moves to another consumer only between two messages. One that is stuck starves its own keys only.
    """

    def __init__(self) -> None:
        self._busy: dict[str, _KeyState] = {}
        self._queues: dict[str | None, _Line] = {}
        """Of each seat; under None what has no key."""
        self._owners: dict[str, str] = {}
        self._seat_ids: tuple[str, ...] = ()
        self._orphans: list[Entry] = []
        """What came while nobody was there."""
        self._count = 0

    def add(self, entry: Entry) -> None:
        """See `Sharing`."""
        self._count += 1
        self._admit(entry, is_new=True)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """See `Sharing`."""
        for entry in entries:
            self._count += 1
            # It stands before all of its key that wait, and its key is free for it alone.
            self._enqueue(entry, is_new=False)

    def share_out(self, seats: Sequence[Seat], most: int, limit: int) -> list[Share]:
        """See `Sharing`."""
        self._notice(seats)
        shares: list[Share] = []
        free = sorted((seat for seat in seats if seat.room), key=lambda seat: seat.in_flight)
        keyless = self._queues.get(None)
        for position, seat in enumerate(free):
            taken: list[Entry] = []
            own = self._queues.get(seat.seat_id)
            if keyless and position == 0 and seat.in_flight and keyless.peek().is_suspect:
                continue  # It needs a seat of its own: the least busy one gets nothing until it is idle.
            if own:
                taken = _fill(seat, own, min(most, limit))
            if keyless and not seat.has_suspect and not (own and own.peek().is_suspect):
                part = -(-len(keyless) // (len(free) - position))
                taken += _fill(seat, keyless, min(min(most, limit) - len(taken), part))
            if taken:
                limit -= len(taken)
                self._count -= len(taken)
                shares.append((seat, taken))
        return shares

    def wants_more(self, seats: Sequence[Seat]) -> bool:
        """See `Sharing`."""
        self._notice(seats)
        keyless = len(self._queues.get(None, ()))
        for seat in seats:
            room = seat.room
            if room and len(self._queues.get(seat.seat_id, ())) + keyless < room:
                return True
        return False

    def settled(self, entry: Entry) -> None:
        """See `Sharing`."""
        if entry.key is None:
            return
        state = self._busy[entry.key]
        if state.waiting:
            self._enqueue(heapq.heappop(state.waiting), is_new=False)
        else:
            del self._busy[entry.key]

    def owner(self, key: str) -> str | None:
        """The consumer of a key: of all that are well, the one that a hash of both puts first."""
        if (found := self._owners.get(key)) is not None:
            return found
        if not self._seat_ids:
            return None
        if len(self._owners) >= MOST_OWNERS:
            self._owners.clear()
        owner = max(self._seat_ids, key=lambda seat_id: _weight(seat_id, key))
        self._owners[key] = owner
        return owner

    def _admit(self, entry: Entry, *, is_new: bool) -> None:
        key = entry.key
        if key is not None:
            state = self._busy.get(key)
            if state is not None:
                heapq.heappush(state.waiting, entry)
                return
            self._busy[key] = _KeyState()
        self._enqueue(entry, is_new=is_new)

    def _enqueue(self, entry: Entry, *, is_new: bool) -> None:
        owner = None if entry.key is None else self.owner(entry.key)
        if entry.key is not None and owner is None:
            self._orphans.append(entry)
            return
        line = self._queues.setdefault(owner, _Line())
        line.add(entry) if is_new else line.put_back((entry,))

    def _notice(self, seats: Sequence[Seat]) -> None:
        """Somebody has come, gone, fallen ill or recovered: keys of which nothing is under way may move."""
        seat_ids = tuple(sorted(seat.seat_id for seat in seats if seat.is_well))
        if seat_ids == self._seat_ids:
            return
        self._seat_ids = seat_ids
        self._owners.clear()
        moving = self._orphans
        self._orphans = []
        for owner in [name for name in self._queues if name is not None]:
            line = self._queues.pop(owner)
            moving += [line.pop() for _ in range(len(line))]
        for entry in sorted(moving):
            self._enqueue(entry, is_new=not entry.is_suspect)

    def __len__(self) -> int:
        return self._count


def _weight(seat_id: str, key: str) -> bytes:
    return blake2b(f"{seat_id}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()


SHARINGS: dict[DeliveryMode, type[Sharing]] = {
    DeliveryMode.SHARED: Shared,
    DeliveryMode.EXCLUSIVE: Exclusive,
    DeliveryMode.KEY_SHARED: KeyShared,
}
