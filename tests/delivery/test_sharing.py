"""Sharing: who gets which message. Each way against a model, and what is peculiar to each."""

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import raydispatch.delivery.sharing as sharing_module
from raydispatch.delivery.sharing import SHARINGS, Entry, Exclusive, KeyShared, Seat, Share, Shared, Sharing
from raydispatch.settings import DeliveryMode

PLENTY = 1_000
ALL_WAYS = pytest.mark.parametrize("make", SHARINGS.values())


def fill(sharing: Sharing, *keys: str | None) -> list[Entry]:
    """One message for each key."""
    entries = [Entry(offset, offset, key) for offset, key in enumerate(keys)]
    for entry in entries:
        sharing.add(entry)
    return entries


def seats_of(*names: str, window: int = 64) -> list[Seat]:
    return [Seat(name, window) for name in names]


def given(shares: list[Share]) -> dict[str, list[int]]:
    """The offsets that each seat got."""
    return {seat.seat_id: [entry.offset for entry in entries] for seat, entries in shares}


def share(sharing: Sharing, seats: list[Seat], most: int = PLENTY, limit: int = PLENTY) -> dict[str, list[int]]:
    return given(sharing.share_out(seats, most, limit))


def settle(sharing: Sharing, seat: Seat, *entries: Entry) -> None:
    """These are done."""
    for entry in entries:
        seat.in_flight -= 1
        seat.has_suspect = seat.has_suspect and not entry.is_suspect
        sharing.settled(entry)


def fail(sharing: Sharing, seat: Seat, entry: Entry) -> None:
    seat.in_flight -= 1
    sharing.held(entry)


def refuse(sharing: Sharing, seat: Seat, *entries: Entry) -> None:
    seat.in_flight -= len(entries)
    sharing.put_back(entries)


def test_every_mode_has_its_sharing() -> None:
    assert set(SHARINGS) == set(DeliveryMode)


# What all have in common


@ALL_WAYS
def test_without_consumers_everything_waits(make: type[Sharing]) -> None:
    sharing = make()
    fill(sharing, "a", None, "b")

    assert share(sharing, []) == {}
    assert len(sharing) == 3
    assert not sharing.wants_more([])


@ALL_WAYS
def test_one_who_is_ill_gets_nothing(make: type[Sharing]) -> None:
    sharing = make()
    fill(sharing, "a", None)
    ill = Seat("ill", 64, is_well=False)

    assert share(sharing, [ill]) == {}
    assert not sharing.wants_more([ill])


@ALL_WAYS
def test_nobody_gets_more_than_its_window(make: type[Sharing]) -> None:
    sharing = make()
    fill(sharing, *[None] * 9)
    (seat,) = seats_of("a", window=4)

    assert share(sharing, [seat]) == {"a": [0, 1, 2, 3]}
    assert share(sharing, [seat]) == {}
    assert (len(sharing), seat.in_flight, seat.room) == (5, 4, 0)


@ALL_WAYS
def test_one_share_has_no_more_than_is_asked_for(make: type[Sharing]) -> None:
    sharing = make()
    fill(sharing, *[None] * 9)
    seats = seats_of("a")

    assert share(sharing, seats, most=2) == {"a": [0, 1]}
    assert share(sharing, seats, limit=3) == {"a": [2, 3, 4]}


@ALL_WAYS
def test_all_shares_together_keep_the_limit(make: type[Sharing]) -> None:
    sharing = make()
    fill(sharing, *"abcdefgh", None, None, None, None)

    shares = share(sharing, seats_of("x", "y", "z"), limit=5)

    assert sum(map(len, shares.values())) <= 5


@ALL_WAYS
def test_what_is_put_back_goes_first(make: type[Sharing]) -> None:
    sharing = make()
    entries = fill(sharing, *[None] * 4)
    (seat,) = seats_of("a", window=2)
    share(sharing, [seat])

    refuse(sharing, seat, *entries[1::-1])

    assert share(sharing, [seat]) == {"a": [0, 1]}


@ALL_WAYS
def test_a_suspect_goes_alone_and_to_one_that_has_nothing_else(make: type[Sharing]) -> None:
    sharing = make()
    entries = fill(sharing, *[None] * 4)
    (seat,) = seats_of("a")
    share(sharing, [seat], limit=3)
    entries[0].is_suspect = True
    refuse(sharing, seat, entries[0])

    assert share(sharing, [seat]) == {}
    settle(sharing, seat, *entries[1:3])
    assert share(sharing, [seat]) == {"a": [0]}
    assert (seat.room, share(sharing, [seat])) == (0, {})
    settle(sharing, seat, entries[0])
    assert share(sharing, [seat]) == {"a": [3]}


@ALL_WAYS
def test_more_is_wanted_while_somebody_would_have_nothing_to_do(make: type[Sharing]) -> None:
    sharing = make()
    (seat,) = seats_of("a", window=2)

    assert sharing.wants_more([seat])
    fill(sharing, None, None)
    assert not sharing.wants_more([seat])
    share(sharing, [seat])
    assert not sharing.wants_more([seat])


# Shared


def test_shared_is_spread_evenly() -> None:
    sharing = Shared()
    fill(sharing, *[None] * 9)

    shares = share(sharing, seats_of("a", "b", "c"))

    assert [len(taken) for taken in shares.values()] == [3, 3, 3]


def test_shared_is_spread_evenly_within_a_limit_too() -> None:
    sharing = Shared()
    fill(sharing, *[None] * 100)

    shares = share(sharing, seats_of("a", "b", "c"), limit=7)

    assert sorted(len(taken) for taken in shares.values()) == [2, 2, 3]


def test_who_has_least_to_do_is_served_first() -> None:
    sharing = Shared()
    fill(sharing, None)
    busy, idle = seats_of("busy", "idle")
    busy.in_flight = 5

    assert share(sharing, [busy, idle]) == {"idle": [0]}


def test_a_consumer_that_is_stuck_holds_up_no_more_than_its_window() -> None:
    sharing = Shared()
    entries = fill(sharing, *[None] * 50)
    stuck, good = seats_of("stuck", "good", window=4)
    done = 0

    for _ in range(50):
        for taken in [taken for seat, taken in sharing.share_out([stuck, good], 4, PLENTY) if seat is good]:
            settle(sharing, good, *taken)
            done += len(taken)

    assert (done, stuck.in_flight, len(sharing)) == (len(entries) - 4, 4, 0)


def test_one_suspect_keeps_others_that_are_idle_from_nothing() -> None:
    sharing = Shared()
    entries = fill(sharing, *[None] * 6)
    first, second = seats_of("a", "b")
    share(sharing, [first], limit=1)
    entries[0].is_suspect = True
    refuse(sharing, first, entries[0])

    assert share(sharing, [first, second]) == {"a": [0], "b": [1, 2, 3, 4, 5]}


# Exclusive


def test_one_gets_everything_in_order() -> None:
    sharing = Exclusive()
    fill(sharing, *[None] * 5)
    seats = seats_of("a", "b")

    assert share(sharing, seats, most=2) == {"a": [0, 1]}
    assert share(sharing, seats, most=2) == {"a": [2, 3]}
    assert sharing.active_id == "a"


def test_the_next_one_takes_over_and_gets_what_was_under_way_first() -> None:
    sharing = Exclusive()
    entries = fill(sharing, *[None] * 5)
    first, second = seats_of("a", "b")
    share(sharing, [first, second], most=2)

    sharing.put_back(entries[:2])

    assert share(sharing, [second]) == {"b": [0, 1, 2, 3, 4]}
    assert sharing.active_id == "b"


def test_who_has_taken_over_keeps_it_when_the_first_one_recovers() -> None:
    sharing = Exclusive()
    first, second = seats_of("a", "b")
    assert sharing.active([first, second]) is first
    first.is_well = False
    assert sharing.active([first, second]) is second

    first.is_well = True

    assert sharing.active([first, second]) is second


def test_the_next_one_waits_for_what_the_former_still_has() -> None:
    sharing = Exclusive()
    entries = fill(sharing, *[None] * 3)
    first, second = seats_of("a", "b")
    share(sharing, [first, second], most=1)
    first.is_well = False

    assert share(sharing, [first, second]) == {}
    settle(sharing, first, entries[0])
    assert share(sharing, [first, second]) == {"b": [1, 2]}


def test_nothing_overtakes_what_failed() -> None:
    sharing = Exclusive()
    entries = fill(sharing, *[None] * 3)
    (seat,) = seats_of("a", window=1)
    share(sharing, [seat])
    fail(sharing, seat, entries[0])

    assert share(sharing, [seat]) == {}
    sharing.put_back(entries[:1])
    assert share(sharing, [seat]) == {"a": [0]}


def test_what_was_given_up_holds_up_nobody() -> None:
    sharing = Exclusive()
    entries = fill(sharing, None, None)
    (seat,) = seats_of("a", window=1)
    share(sharing, [seat])
    fail(sharing, seat, entries[0])

    sharing.settled(entries[0])

    assert share(sharing, [seat]) == {"a": [1]}


def test_what_stands_before_the_failed_one_still_goes() -> None:
    sharing = Exclusive()
    entries = fill(sharing, None, None)
    (seat,) = seats_of("a")
    share(sharing, [seat])
    fail(sharing, seat, entries[1])
    refuse(sharing, seat, entries[0])

    assert share(sharing, [seat]) == {"a": [0]}


def test_of_what_was_refused_only_that_goes_which_stands_before_the_failed_one() -> None:
    sharing = Exclusive()
    entries = fill(sharing, *[None] * 4)
    (seat,) = seats_of("a")
    share(sharing, [seat])
    fail(sharing, seat, entries[1])
    refuse(sharing, seat, entries[0], entries[2], entries[3])

    assert share(sharing, [seat]) == {"a": [0]}


# Key-shared


def test_of_one_key_one_message_is_under_way_at_a_time() -> None:
    sharing = KeyShared()
    entries = fill(sharing, "k", "k", "k")
    (seat,) = seats_of("a")

    assert share(sharing, [seat]) == {"a": [0]}
    assert share(sharing, [seat]) == {}
    settle(sharing, seat, entries[0])
    assert share(sharing, [seat]) == {"a": [1]}


def test_other_keys_go_on_meanwhile() -> None:
    sharing = KeyShared()
    fill(sharing, "k", "k", "l", "k", "m")

    assert share(sharing, seats_of("a")) == {"a": [0, 2, 4]}


def test_one_key_goes_to_one_consumer_always() -> None:
    sharing = KeyShared()
    seats = seats_of("a", "b", "c")
    seen: dict[str, set[str]] = defaultdict(set)
    for offset in range(200):
        sharing.add(Entry(offset, offset, f"k{offset % 20}"))

    while shares := sharing.share_out(seats, 3, PLENTY):
        for seat, taken in shares:
            for entry in taken:
                seen[entry.key or ""].add(seat.seat_id)
            settle(sharing, seat, *taken)

    assert len(sharing) == 0
    assert all(len(owners) == 1 for owners in seen.values())
    assert len(set.union(*seen.values())) == 3


def test_keys_are_spread_over_all() -> None:
    sharing = KeyShared()
    sharing.share_out(seats_of("a", "b", "c", "d"), PLENTY, PLENTY)

    owners = Counter(sharing.owner(f"customer-{number}") for number in range(2_000))

    assert set(owners) == {"a", "b", "c", "d"}
    assert min(owners.values()) > 400


def test_when_one_leaves_only_its_keys_move() -> None:
    sharing = KeyShared()
    seats = seats_of("a", "b", "c")
    sharing.share_out(seats, PLENTY, PLENTY)
    before = {key: sharing.owner(key) for key in map(str, range(300))}

    sharing.share_out(seats[:2], PLENTY, PLENTY)

    after = {key: sharing.owner(key) for key in before}
    assert all(after[key] == owner for key, owner in before.items() if owner != "c")
    assert set(after.values()) == {"a", "b"}


def test_when_one_joins_keys_move_to_it_only() -> None:
    sharing = KeyShared()
    seats = seats_of("a", "b", "c")
    sharing.share_out(seats[:2], PLENTY, PLENTY)
    before = {key: sharing.owner(key) for key in map(str, range(300))}

    sharing.share_out(seats, PLENTY, PLENTY)

    moved = {sharing.owner(key) for key, owner in before.items() if sharing.owner(key) != owner}
    assert moved == {"c"}


def test_a_key_moves_only_when_nothing_of_it_is_under_way() -> None:
    sharing = KeyShared()
    entries = fill(sharing, "k", "k")
    first, second = seats_of("a", "b")
    sharing.share_out([first], PLENTY, PLENTY)
    first.is_well = False

    assert share(sharing, [first, second]) == {}
    settle(sharing, first, entries[0])
    assert share(sharing, [first, second]) == {"b": [1]}


def test_a_key_that_waits_for_its_next_try_keeps_its_order() -> None:
    sharing = KeyShared()
    entries = fill(sharing, "k", "k", "l")
    (seat,) = seats_of("a")
    share(sharing, [seat])
    fail(sharing, seat, entries[0])

    assert share(sharing, [seat]) == {}
    sharing.put_back(entries[:1])
    assert share(sharing, [seat]) == {"a": [0]}


def test_a_consumer_that_is_stuck_starves_its_own_keys_only() -> None:
    sharing = KeyShared()
    seats = seats_of("stuck", "good", window=2)
    sharing.share_out(seats, 0, 0)
    keys = [f"k{number}" for number in range(40)]
    fill(sharing, *keys)
    done: set[str | None] = set()

    for _ in range(40):
        for seat, taken in sharing.share_out(seats, 2, PLENTY):
            if seat.seat_id == "good":
                settle(sharing, seat, *taken)
                done |= {entry.key for entry in taken}

    assert done == {key for key in keys if sharing.owner(key) == "good"}


def test_messages_without_a_key_go_to_anybody() -> None:
    sharing = KeyShared()
    fill(sharing, *[None] * 9)

    shares = share(sharing, seats_of("a", "b", "c"))

    assert [len(taken) for taken in shares.values()] == [3, 3, 3]


def test_what_came_while_nobody_was_there_goes_in_order() -> None:
    sharing = KeyShared()
    fill(sharing, "k", "l", None, "m")

    assert sorted(share(sharing, seats_of("a"))["a"]) == [0, 1, 2, 3]


def test_owners_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_module, "MOST_OWNERS", 10)
    sharing = KeyShared()
    sharing.share_out(seats_of("a", "b"), PLENTY, PLENTY)
    first = [sharing.owner(str(number)) for number in range(25)]

    again = [sharing.owner(str(number)) for number in range(25)]

    assert again == first
    assert len(sharing._owners) <= 10


def test_a_key_that_is_no_text_has_an_owner_too() -> None:
    sharing = KeyShared()
    fill(sharing, "\ud800")

    assert share(sharing, seats_of("a", "b"))


def test_a_suspect_is_not_kept_waiting_by_messages_without_a_key() -> None:
    sharing = KeyShared()
    (seat,) = seats_of("a", window=4)
    suspect, *running = fill(sharing, "k", None)
    sharing.share_out([seat], PLENTY, PLENTY)
    suspect.is_suspect = True
    refuse(sharing, seat, suspect)
    seen = set()

    for offset in range(2, 50):
        sharing.add(Entry(offset, 0))
        running += [entry for _, taken in sharing.share_out([seat], PLENTY, PLENTY) for entry in taken]
        seen |= {entry.offset for entry in running}
        settle(sharing, seat, *running[:1])
        running = running[1:]

    assert 0 in seen


# Against a model


class SharingAgainstModel(RuleBasedStateMachine):
    """Each message is at one place at a time: it waits, is with a seat, is held, or is done."""

    make: type[Sharing]

    def __init__(self) -> None:
        super().__init__()
        self.sharing = self.make()
        self.seats: list[Seat] = []
        self.names = 0
        self.entries: list[Entry] = []
        self.waiting: set[int] = set()
        self.out: dict[int, Seat] = {}
        self.held: set[int] = set()
        self.done: set[int] = set()

    def of(self, offsets: Any) -> list[Entry]:
        return [self.entries[offset] for offset in offsets]

    def free(self, seat: Seat, *entries: Entry) -> None:
        """As a subscription does when it hears of them."""
        for entry in entries:
            del self.out[entry.offset]
            seat.in_flight -= 1
            if entry.is_suspect:
                seat.has_suspect = False

    @rule(keys=st.lists(st.none() | st.sampled_from("abc"), min_size=1, max_size=6))
    def add(self, keys: list[str | None]) -> None:
        for key in keys:
            entry = Entry(len(self.entries), len(self.entries), key)
            self.entries.append(entry)
            self.waiting.add(entry.offset)
            self.sharing.add(entry)

    @rule(window=st.sampled_from([1, 2, 5]))
    def join(self, window: int) -> None:
        self.names += 1
        self.seats.append(Seat(f"seat-{self.names}", window))

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        self.seats.remove(seat)
        back = [offset for offset, holder in self.out.items() if holder is seat]
        for offset in back:
            del self.out[offset]
        self.waiting |= set(back)
        self.sharing.put_back(self.of(back))

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def fall_ill_or_recover(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        seat.is_well = not seat.is_well

    @rule(most=st.integers(1, 6), limit=st.integers(0, 8))
    def share_out(self, most: int, limit: int) -> None:
        rooms = {seat.seat_id: seat.room for seat in self.seats}
        busy = {seat.seat_id: seat.in_flight for seat in self.seats}
        before = dict(self.out)

        shares = self.sharing.share_out(self.seats, most, limit)

        assert sum(len(taken) for _, taken in shares) <= limit
        assert len({seat.seat_id for seat, _ in shares}) == len(shares)
        for seat, taken in shares:
            offsets = [entry.offset for entry in taken]
            assert 0 < len(taken) <= min(most, rooms[seat.seat_id])
            assert len(set(offsets)) == len(offsets)
            assert set(offsets) <= self.waiting
            if any(entry.is_suspect for entry in taken):
                assert (len(taken), busy[seat.seat_id], seat.has_suspect) == (1, 0, True)
            self.waiting -= set(offsets)
            self.out |= dict.fromkeys(offsets, seat)
        self.check_shares(before, shares, limit)

    def check_shares(self, before: dict[int, Seat], shares: list[Share], limit: int) -> None:
        """What the one way promises."""

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def settle_one(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.settle(offset)

    def settle(self, offset: int) -> None:
        self.free(self.out[offset], self.entries[offset])
        self.done.add(offset)
        self.sharing.settled(self.entries[offset])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def hold_one(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.free(self.out[offset], self.entries[offset])
        self.held.add(offset)
        self.sharing.held(self.entries[offset])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), gives_up=st.booleans())
    def end_a_hold(self, data: st.DataObject, gives_up: bool) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(offset)
        if gives_up:
            self.done.add(offset)
            self.sharing.settled(self.entries[offset])
        else:
            self.waiting.add(offset)
            self.sharing.put_back([self.entries[offset]])

    @precondition(lambda self: self.out)
    @rule(data=st.data(), is_lost=st.booleans())
    def put_back_some(self, data: st.DataObject, is_lost: bool) -> None:
        seat = data.draw(st.sampled_from([one for one in self.seats if one in self.out.values()]))
        mine = sorted(offset for offset, holder in self.out.items() if holder is seat)
        back = self.of(data.draw(st.permutations(mine))[: data.draw(st.integers(1, len(mine)))])
        self.free(seat, *back)
        for entry in back:
            entry.is_suspect = entry.is_suspect or is_lost
            self.waiting.add(entry.offset)
        self.sharing.put_back(back)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.sharing) == len(self.waiting)
        assert len(self.waiting) + len(self.out) + len(self.held) + len(self.done) == len(self.entries)

    @invariant()
    def nobody_has_more_than_its_window(self) -> None:
        counts = Counter(seat.seat_id for seat in self.out.values())
        for seat in self.seats:
            assert seat.in_flight == counts[seat.seat_id] <= seat.window
            suspects = [one for one, holder in self.out.items() if holder is seat and self.entries[one].is_suspect]
            assert seat.has_suspect == bool(suspects)
            assert not suspects or counts[seat.seat_id] == 1

    @invariant()
    def more_is_wanted_if_anybody_would_be_idle(self) -> None:
        if self.sharing.wants_more(self.seats):
            assert any(seat.room for seat in self.seats)

    def teardown(self) -> None:
        """Let all end well: then everything is done."""
        for seat in self.seats:
            seat.is_well = True
        self.join(window=2)
        for _ in range(3 * len(self.entries) + 3):
            for offset in sorted(self.held):
                self.held.discard(offset)
                self.waiting.add(offset)
                self.sharing.put_back([self.entries[offset]])
            for offset in sorted(self.out):
                self.settle(offset)
            self.share_out(most=5, limit=PLENTY)
        assert len(self.done) == len(self.entries)


class SharedAgainstModel(SharingAgainstModel):
    make = Shared

    def check_shares(self, before: dict[int, Seat], shares: list[Share], limit: int) -> None:
        offsets = [entry.offset for _, taken in shares for entry in taken]
        assert offsets == sorted(self.waiting | set(offsets))[: len(offsets)]
        if self.waiting and limit and not shares:
            first = self.entries[min(self.waiting)]
            assert all(not seat.room or (first.is_suspect and seat.in_flight) for seat in self.seats)


class ExclusiveAgainstModel(SharingAgainstModel):
    make = Exclusive

    def check_shares(self, before: dict[int, Seat], shares: list[Share], limit: int) -> None:
        assert len(shares) <= 1
        for seat, taken in shares:
            offsets = [entry.offset for entry in taken]
            assert all(holder is seat for holder in before.values())
            assert offsets == sorted(self.waiting | set(offsets))[: len(offsets)]
            assert offsets[-1] < min(self.held, default=len(self.entries)), "nothing overtakes what failed"

    @invariant()
    def one_is_active(self) -> None:
        # More than one only while those who are not any more end what they have.
        assert sum(seat.in_flight > 0 for seat in self.seats) <= 1


class KeySharedAgainstModel(SharingAgainstModel):
    make = KeyShared

    def check_shares(self, before: dict[int, Seat], shares: list[Share], limit: int) -> None:
        for seat, taken in shares:
            for entry in taken:
                if entry.key is not None:
                    same = {one.offset for one in self.entries if one.key == entry.key}
                    assert entry.offset == min(same - self.done), "a key is done in order"
                    assert isinstance(self.sharing, KeyShared)
                    assert self.sharing.owner(entry.key) == seat.seat_id

    @invariant()
    def one_of_a_key_is_under_way(self) -> None:
        keys = [self.entries[offset].key for offset in [*self.out, *self.held] if self.entries[offset].key is not None]
        assert len(set(keys)) == len(keys)


for _machine in (SharedAgainstModel, ExclusiveAgainstModel, KeySharedAgainstModel):
    _machine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestSharedAgainstModel = SharedAgainstModel.TestCase
TestExclusiveAgainstModel = ExclusiveAgainstModel.TestCase
TestKeySharedAgainstModel = KeySharedAgainstModel.TestCase
