"""Windows and cursors: what is open, what is safe, and what a crash makes of it."""

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raydispatch.delivery.segment import FORMAT
from raydispatch.delivery.window import Cursor, Window
from raydispatch.errors import JournalCorrupt


def window_of(*offsets: int) -> Window:
    """One that has taken these."""
    window = Window()
    for offset in offsets:
        window.take(offset)
    return window


def reopened(window: Window, ahead: int = 0) -> Window:
    """What the next process makes of the cursor that was kept."""
    return Window(Cursor.unpack(window.cursor(ahead).pack()))


# The safe cursor


def test_a_new_window_begins_at_the_first_offset() -> None:
    window = Window()

    assert (window.position, window.safe, window.open, len(window)) == (0, 0, [], 0)


def test_the_safe_cursor_waits_for_what_is_open() -> None:
    window = window_of(0, 1, 2, 3)

    window.settle(0)
    window.settle(2)

    assert (window.safe, window.position, window.open) == (1, 4, [1, 3])


def test_the_safe_cursor_jumps_over_all_that_was_settled_before() -> None:
    window = window_of(0, 1, 2, 3)
    for offset in (1, 2, 0):
        window.settle(offset)

    assert window.safe == 3


def test_what_was_not_taken_counts_as_settled() -> None:
    window = window_of(3, 7)

    assert window.safe == 3
    window.settle(3)
    assert window.safe == 7
    window.settle(7)
    assert window.safe == 8


def test_what_is_passed_is_no_more_of_this_subscription() -> None:
    window = window_of(0)

    window.pass_to(10)
    window.pass_to(5)

    assert (window.position, window.safe) == (10, 0)
    window.settle(0)
    assert window.safe == 10


def test_an_offset_is_taken_once() -> None:
    window = window_of(0, 4)

    with pytest.raises(ValueError, match="offset 4"):
        window.take(4)
    with pytest.raises(ValueError, match="offset 2"):
        window.take(2)


def test_an_offset_is_settled_once() -> None:
    window = window_of(0)

    assert window.settle(0)
    assert not window.settle(0)
    assert not window.settle(99)


# Tries and deliveries


def test_tries_are_counted_for_each_offset() -> None:
    window = window_of(0, 1)

    assert [window.tried(0), window.tried(0), window.tried(1)] == [1, 2, 1]
    assert [window.deliveries(0), window.deliveries(1)] == [2, 1]


def test_the_first_delivery_of_a_message_knows_of_none_before() -> None:
    assert window_of(0).deliveries(0) == 0


def test_a_delivery_that_nobody_heard_of_counts_as_one() -> None:
    window = window_of(0)

    window.unheard(0)
    window.unheard(0)
    window.tried(0)

    assert window.deliveries(0) == 3


def test_what_is_settled_is_forgotten() -> None:
    window = window_of(0)
    window.unheard(0)

    window.settle(0)

    assert not window.is_open(0)
    assert window.cursor() == Cursor(1, [], 1)


# After a crash


def test_what_was_open_is_open_again_and_may_have_been_delivered() -> None:
    window = window_of(0, 1, 2)
    window.settle(1)

    again = reopened(window, ahead=1)

    assert (again.open, again.position, again.safe) == ([0, 2], 3, 0)
    assert [again.deliveries(0), again.deliveries(2)] == [1, 1]


def test_after_an_end_in_order_what_is_open_was_delivered_as_often_as_is_known() -> None:
    window = window_of(0, 1, 2)
    window.unheard(1)
    window.tried(2)

    again = reopened(window, ahead=0)

    assert [again.deliveries(offset) for offset in range(3)] == [0, 1, 1]
    assert not any(again.covers(offset) for offset in range(3))


def test_after_a_crash_an_end_in_order_says_no_more_than_is_known() -> None:
    again = reopened(reopened(window_of(0), ahead=5))

    again.take(1)

    assert [again.deliveries(0), again.deliveries(1)] == [2, 1]


def test_tries_survive() -> None:
    window = window_of(0)
    window.tried(0)
    window.tried(0)

    again = reopened(window)

    assert again.tried(0) == 3


def test_what_was_promised_ahead_may_have_been_delivered() -> None:
    window = window_of(0)
    window.settle(0)

    again = reopened(window, ahead=2)
    for offset in (1, 2, 3):
        again.take(offset)

    assert [again.deliveries(offset) for offset in (1, 2, 3)] == [1, 1, 0]


def test_a_promise_survives_a_second_crash() -> None:
    first = reopened(window_of(0), ahead=5)

    second = reopened(first)
    second.take(3)

    assert second.deliveries(3) == 1


def test_a_window_that_was_closed_in_order_promises_nothing() -> None:
    window = window_of(0)
    window.settle(0)

    again = reopened(window)
    again.take(1)

    assert again.deliveries(1) == 0


def test_only_what_a_kept_cursor_covers_may_be_delivered() -> None:
    window = Window()
    assert not window.covers(0)

    cursor = window.cursor(ahead=3)
    assert not window.covers(0)
    window.kept(cursor)

    assert [window.covers(offset) for offset in range(5)] == [True, True, True, False, False]


def test_what_counts_is_the_promise_of_the_cursor_that_was_kept_last() -> None:
    window = Window()
    window.kept(window.cursor(ahead=9))

    window.kept(window.cursor(ahead=1))

    assert [window.covers(0), window.covers(1)] == [True, False]


# Bytes


@pytest.mark.parametrize(
    "cursor", [Cursor(), Cursor(7), Cursor(7, ((1, 0, 2), (5, 3, 0)), 12), Cursor(2**40, ((2**33, 1, 1),), 2**41)]
)
def test_a_cursor_comes_back(cursor: Cursor) -> None:
    assert Cursor.unpack(cursor.pack()) == cursor


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", msgpack.packb(7), msgpack.packb([])], ids=repr)
def test_bytes_that_are_no_cursor_are_corrupt(data: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        Cursor.unpack(data)


def test_another_format_is_refused_and_named() -> None:
    with pytest.raises(JournalCorrupt, match=f"format {FORMAT + 1}.*reads {FORMAT}"):
        Cursor.unpack(msgpack.packb((FORMAT + 1, 7, (), 7)))


@pytest.mark.parametrize("fields", [(), (7,), (7, ()), (7, (), 7, 7), (None, (), 7), (7, 7, 7), (7, ((1,),), 7)])
def test_what_is_no_whole_cursor_is_corrupt(fields: tuple[object, ...]) -> None:
    with pytest.raises(JournalCorrupt):
        Window(Cursor.unpack(msgpack.packb((FORMAT, *fields))))


class WindowAgainstModel(RuleBasedStateMachine):
    """A window and its crashes. The model knows of every offset what really became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()
        self.cursor = self.window.cursor()
        """The one that was kept last."""
        self.open: dict[int, int] = {}
        """With the tries that failed."""
        self.settled: set[int] = set()
        self.passed: set[int] = set()
        self.delivered: set[int] = set()
        """In any life, whoever knows of it."""
        self.known: dict[int, tuple[int, int]] = {}
        """Of this life: tries and losses that the window was told of."""
        self.taken: set[int] = set()

    @rule(gap=st.integers(0, 3))
    def take(self, gap: int) -> None:
        offset = self.window.position + gap
        # What is ours is so for ever: what a life before has taken is not skipped by the next one.
        between = set(range(self.window.position, offset)) & self.taken
        offset = min(between, default=offset)
        if offset in self.passed:
            return
        self.passed |= set(range(self.window.position, offset))

        self.window.take(offset)

        self.taken.add(offset)
        self.open[offset] = 0
        self.known[offset] = (0, 0)

    @rule(count=st.integers(0, 3))
    def pass_to(self, count: int) -> None:
        end = min([offset for offset in self.taken if offset >= self.window.position], default=self.window.position + 9)
        end = min(end, self.window.position + count)
        self.passed |= set(range(self.window.position, end))

        self.window.pass_to(end)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)))
        if not self.window.covers(offset):
            self.keep(ahead=4)
        assert (offset not in self.delivered) or self.window.deliveries(offset) >= 1
        self.delivered.add(offset)
        data.draw(st.sampled_from([self.ack, self.fail, self.lose, self.leave]))(offset)

    def ack(self, offset: int) -> None:
        assert self.window.settle(offset)
        self.settled.add(offset)
        del self.open[offset]

    def fail(self, offset: int) -> None:
        self.open[offset] += 1
        assert self.window.tried(offset) == self.open[offset]

    def lose(self, offset: int) -> None:
        before = self.window.deliveries(offset)
        self.window.unheard(offset)
        assert self.window.deliveries(offset) == before + 1

    def leave(self, offset: int) -> None:
        """It is still with its consumer; nothing may be delivered twice at a time, so that a crash comes next."""
        self.crash()

    @rule(ahead=st.integers(0, 5))
    def keep(self, ahead: int) -> None:
        cursor = self.window.cursor(ahead)
        data = cursor.pack()
        assert Cursor.unpack(data) == cursor._replace(open=tuple(cursor.open))
        self.cursor = Cursor.unpack(data)
        self.window.kept(cursor)

    @rule()
    def crash(self) -> None:
        before = self.settled.copy()
        self.window = Window(self.cursor)
        kept_open = {offset: tries for offset, tries, _ in self.cursor.open}

        lost = {offset for offset in self.open if offset not in kept_open}
        assert all(offset >= self.window.position for offset in lost)
        # Only what was settled since the cursor was kept comes again.
        self.settled = {one for one in before if one < self.window.position and one not in kept_open}
        self.passed = {one for one in self.passed if one < self.window.position}
        self.open = kept_open

    @invariant()
    def what_is_open_is_open(self) -> None:
        assert self.window.open == sorted(self.open)
        assert len(self.window) == len(self.open)
        assert all(self.window.is_open(offset) for offset in self.open)
        assert not any(self.window.is_open(offset) for offset in self.settled)

    @invariant()
    def the_safe_cursor_never_passes_what_is_open(self) -> None:
        assert self.window.safe == min(self.open, default=self.window.position)
        assert all(offset in self.settled or offset in self.passed for offset in range(self.window.safe))

    @invariant()
    def what_was_delivered_before_says_so(self) -> None:
        for offset in self.delivered & set(self.open):
            assert self.window.deliveries(offset) >= 1


WindowAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWindowAgainstModel = WindowAgainstModel.TestCase
