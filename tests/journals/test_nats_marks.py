from raydispatch.journals.nats_marks import MOST, Mark, Marks


def mark(sequence: int) -> Mark:
    return Mark(sequence, sequence * 10, sequence * 10 + 10, float(sequence))


def marks_of(*sequences: int) -> Marks:
    marks = Marks()
    for sequence in sequences:
        marks.add(mark(sequence))
    return marks


def test_a_place_is_between_two_marks() -> None:
    marks = marks_of(5, 1, 9, 5)

    assert marks.around(lambda one: one.end > 20) == (mark(1), mark(5))
    assert marks.around(lambda one: one.end > 59) == (mark(1), mark(5))
    assert marks.around(lambda one: one.end > 60) == (mark(5), mark(9))
    assert marks.around(lambda one: one.at >= 9) == (mark(5), mark(9))


def test_a_place_may_be_before_all_or_behind_all() -> None:
    marks = marks_of(5, 9)

    assert marks.around(lambda _: True) == (None, mark(5))
    assert marks.around(lambda _: False) == (mark(9), None)
    assert Marks().around(lambda _: True) == (None, None)


def test_what_is_gone_has_no_marks() -> None:
    marks = marks_of(1, 5, 9)

    marks.forget_before(5)

    assert marks.around(lambda one: one.sequence > 0) == (None, mark(5))


def test_marks_are_bounded_and_stay_spread() -> None:
    marks = marks_of(*range(1, 10 * MOST))

    gaps = []
    for sequence in range(1, 10 * MOST, 97):
        before, behind = marks.around(lambda one, sequence=sequence: one.sequence >= sequence)  # type: ignore[misc]
        gaps.append((behind.sequence if behind else 10 * MOST) - (before.sequence if before else 0))
    assert len(marks._marks) <= MOST
    assert max(gaps) <= 100
