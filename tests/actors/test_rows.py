from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.fakes import TOPIC, table_of

from raydispatch.actors.choices import Choice, Choices
from raydispatch.actors.rows import (
    Positions,
    RowDelivery,
    RowKey,
    RowPart,
    RowReport,
    RowsDone,
    Shipment,
    joined,
    row_choice,
    split_rows,
)
from raydispatch.actors.wire import Selection
from raydispatch.dispatch.outcome import WORST_FIRST, DispatchStatus, Outcome, worst_status
from raydispatch.errors import ErrorCode

SUCCESS = Outcome("a", DispatchStatus.SUCCESS, attempts=1)
FAILED = Outcome("a", DispatchStatus.DISPATCHER_ERROR, attempts=1, error_message="down")
SKIPPED = Outcome("a", DispatchStatus.SKIPPED, attempts=1)
FAULT = (DispatchStatus.INVALID_MESSAGE.value, ErrorCode.INVALID_TOPIC.value, "invalid topic")


def codes_of(*codes: int) -> npt.NDArray[np.int32]:
    return np.array(codes, np.int32)


def at(*positions: int) -> npt.NDArray[np.int64]:
    return np.array(positions, np.int64)


def listed(rows: Positions) -> list[int] | None:
    return None if rows is None else rows.tolist()


def outcomes_of(report: RowReport, count: int) -> list[Outcome]:
    """For each row."""
    return [report.kinds[code] for code in report.codes_of(count).tolist()]


def shipment_of(*codes: int, keys: int = 3, **options: Any) -> Shipment:
    names = [RowKey(f"dev.{name}.events", "Order") for name in "xyz"[:keys]]
    return Shipment(names, codes_of(*codes), ["content"], 5.0, **options)


def part_of(count: int, rows: Positions = None) -> RowPart:
    return RowPart([RowKey(TOPIC, "Order")], ["route"], np.arange(count, dtype=np.int32), rows, ["content"])


def choice_of(*stages: tuple[str, ...]) -> Choice:
    """To these dispatchers, by a route with the name of each."""
    targets = tuple(tuple((name, f"route {name}") for name in stage) for stage in stages)
    return Choice(Selection(tuple(target for stage in targets for target in stage)), targets)


# Shipments and parts


def test_a_shipment_goes_to_a_router_as_rows() -> None:
    class Router:
        def __getattr__(self, method: str) -> Any:
            return type("Method", (), {"remote": staticmethod(lambda shipment: (method, shipment.size))})

    assert shipment_of(0, 1, 0).call(Router()) == ("route_rows", 3)


def test_a_shipment_that_goes_again_says_so_and_has_less_time() -> None:
    shipment = shipment_of(0, 1)

    again = shipment.within(1.5).again()

    assert (again.seconds, again.resent, again.codes is shipment.codes) == (1.5, True, True)
    assert not shipment.resent


def test_a_shipment_that_no_router_takes_ends_for_every_row_in_the_same_way() -> None:
    shipment = shipment_of(0, 1, 0)

    delivery = shipment.nowhere(ErrorCode.TIME_LIMIT, "no router", DispatchStatus.TIMEOUT)

    assert delivery.parts == []
    assert {selection.fault for selection in delivery.selections} == {("timeout", "time_limit", "no router")}
    assert [WORST_FIRST[number] for number in delivery.statuses(shipment.codes)] == [DispatchStatus.TIMEOUT] * 3


def test_pieces_of_a_part_follow_one_another() -> None:
    part = part_of(5)

    pieces = [part.piece(start, start + 2) for start in (0, 2, 4)]

    assert [listed(piece.rows) for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert [piece.codes.tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]


def test_a_piece_of_a_piece_is_still_about_the_rows_of_the_content() -> None:
    part = part_of(3, at(10, 20, 30)).piece(1, 3)

    assert listed(part.take(at(1)).rows) == [30]
    assert listed(part_of(3).take(at(2, 0)).rows) == [2, 0]
    assert part_of(3).take(at(2, 0)).codes.tolist() == [2, 0]


# Splitting


def test_every_dispatcher_gets_the_rows_of_its_keys() -> None:
    shipment = shipment_of(0, 1, 2, 1, 0, resent=True)
    choices = [choice_of(("a",)), choice_of(("a", "b")), choice_of(("b",))]

    (a, a_rows, a_part), (b, b_rows, b_part) = split_rows(shipment, choices, 0)

    assert (a, listed(a_rows), a_part.codes.tolist()) == ("a", [0, 1, 3, 4], [0, 1, 1, 0])
    assert (b, listed(b_rows), b_part.codes.tolist()) == ("b", [1, 2, 3], [1, 2, 1])
    assert (a_part.route_ids, b_part.route_ids) == (["route a", "route a", ""], ["", "route b", "route b"])
    assert a_part.resent
    assert a_part.content is shipment.content


def test_a_dispatcher_of_all_rows_gets_them_without_a_list_of_positions() -> None:
    shipment = shipment_of(0, 1, 0, keys=2)

    ((_, rows, part),) = split_rows(shipment, [choice_of(("a",))] * 2, 0)

    assert rows is None
    assert part.rows is None
    assert part.codes is shipment.codes


def test_a_lower_priority_is_a_stage_of_its_own() -> None:
    shipment = shipment_of(0, 1, keys=2)
    choices = [choice_of(("a",), ("b",)), choice_of(("b",))]

    stages = [[(name, listed(rows)) for name, rows, _ in split_rows(shipment, choices, stage)] for stage in range(3)]

    assert stages == [[("a", [0]), ("b", [1])], [("b", [0])], []]


def test_a_key_without_rows_makes_no_part() -> None:
    assert split_rows(shipment_of(0, 0, keys=2), [choice_of(), choice_of(("a",))], 0) == []


def test_a_key_that_goes_nowhere_is_in_no_part() -> None:
    shipment = shipment_of(0, 1, keys=2)

    ((_, rows, _),) = split_rows(shipment, [Choice(Selection((), FAULT), ()), choice_of(("a",))], 0)

    assert listed(rows) == [1]


# Choosing


def test_a_row_with_a_fault_goes_nowhere() -> None:
    assert row_choice(choice_of(("a",)), RowKey(TOPIC, "Order", None, FAULT)) == Choice(Selection((), FAULT), ())


def test_a_row_for_all_dispatchers_goes_where_the_table_says() -> None:
    choice = choice_of(("a",), ("b",))

    assert row_choice(choice, RowKey(TOPIC, "Order")) is choice


def test_a_row_for_some_dispatchers_goes_to_those_of_them_that_the_table_selects() -> None:
    choice = choice_of(("a", "b"), ("c",), ("d", "e"))

    chosen = row_choice(choice, RowKey(TOPIC, "Order", ("b", "d", "stranger")))

    assert chosen == choice_of(("b",), ("d",))


def test_a_row_for_dispatchers_that_take_it_no_more_has_none() -> None:
    chosen = row_choice(choice_of(("a",)), RowKey(TOPIC, "Order", ("gone", "away")))

    assert chosen.stages == ()
    assert chosen.selection.fault is not None
    status, code, words = chosen.selection.fault
    assert (status, code) == ("no_dispatcher", "no_dispatcher")
    assert "gone, away" in words
    assert TOPIC in words


def test_a_row_that_no_dispatcher_takes_keeps_the_words_of_the_table() -> None:
    (choice,) = Choices().of(table_of(("a", "dev.x.*", 0)), [("dev.y.events", "Order")])

    assert row_choice(choice, RowKey("dev.y.events", "Order", ("a",))) is choice


# Joining


def test_reports_stand_where_their_rows_stand() -> None:
    first = RowReport([SUCCESS, FAILED], codes_of(0, 1), 2.0)
    second = RowReport([FAILED, SKIPPED], codes_of(1, 0, 1), np.array([3, 4, 5], np.float32))

    report = joined([first, second], [at(4, 0), at(1, 2, 3)])

    assert outcomes_of(report, 5) == [FAILED, SKIPPED, FAILED, SKIPPED, SUCCESS]
    assert report.kinds == [SUCCESS, FAILED, SKIPPED]
    assert report.durations_of(5).tolist() == [2, 3, 4, 5, 2]


def test_reports_that_say_the_same_say_it_once() -> None:
    report = joined([RowReport([SUCCESS], None, 1.0), RowReport([SUCCESS], None, 2.0)], [at(0, 2), at(1)])

    assert (report.kinds, report.codes) == ([SUCCESS], None)
    assert report.durations_of(3).tolist() == [1, 2, 1]


def test_a_report_alone_stays_as_it_is() -> None:
    report = RowReport.alike(SUCCESS._replace(duration_ms=3.0))

    assert joined([report], [at(0, 1)]) is report
    assert report.codes_of(2).tolist() == [0, 0]
    assert report.durations_of(2).tolist() == [3, 3]


@settings(deadline=None)
@given(st.data())
def test_however_rows_are_dealt_out_their_reports_join_to_the_whole(data: st.DataObject) -> None:
    outcomes = data.draw(st.lists(st.sampled_from([SUCCESS, FAILED, SKIPPED]), min_size=1, max_size=12))
    hands = data.draw(st.lists(st.integers(0, 3), min_size=len(outcomes), max_size=len(outcomes)))
    positions = [at(*(row for row, owner in enumerate(hands) if owner == hand)) for hand in sorted(set(hands))]

    reports = [report_of([outcomes[row] for row in rows]) for rows in positions]

    assert outcomes_of(joined(reports, positions), len(outcomes)) == outcomes


def report_of(outcomes: list[Outcome]) -> RowReport:
    kinds = list(dict.fromkeys(outcomes))
    codes = codes_of(*(kinds.index(outcome) for outcome in outcomes))
    return RowReport(kinds, codes if len(kinds) > 1 else None, 1.0)


# Statuses


def test_the_worst_outcome_stands_for_a_row() -> None:
    parts = [
        RowsDone("a", None, RowReport([SUCCESS, FAILED], codes_of(0, 1, 0), 1.0)),
        RowsDone("b", at(0, 1), RowReport.alike(SKIPPED)),
    ]
    delivery = RowDelivery("version", [choice_of(("a", "b")).selection], parts)

    statuses = [WORST_FIRST[number].value for number in delivery.statuses(codes_of(0, 0, 0))]

    assert statuses == ["skipped", "dispatcher_error", "success"]


STATUSES = st.sampled_from(DispatchStatus)


@settings(deadline=None)
@given(st.data())
def test_the_statuses_of_a_fan_out_are_those_of_each_row_on_its_own(data: st.DataObject) -> None:
    # For each key, the dispatchers that take it, or none and a fault; for each row and dispatcher, an outcome.
    targets = data.draw(st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4))
    faults = [None if names else (data.draw(STATUSES).value, "code", "words") for names in targets]
    codes = data.draw(st.lists(st.integers(0, len(targets) - 1), max_size=12))
    outcomes = [{name: Outcome(name, data.draw(STATUSES)) for name in sorted(targets[code])} for code in codes]

    statuses = delivered(targets, faults, outcomes).statuses(codes_of(*codes))

    assert [WORST_FIRST[number] for number in statuses] == [
        worst_status(list(of_row.values())) if of_row else fault_status(faults[code])
        for code, of_row in zip(codes, outcomes, strict=True)
    ]


def delivered(
    targets: list[set[str]], faults: list[tuple[str, str, str] | None], outcomes: list[dict[str, Outcome]]
) -> RowDelivery:
    selections = [
        Selection(tuple((name, "route") for name in sorted(names)), fault)
        for names, fault in zip(targets, faults, strict=True)
    ]
    parts = []
    for name in "abc":
        rows = [row for row, of_row in enumerate(outcomes) if name in of_row]
        if rows:
            everyone = len(rows) == len(outcomes)
            report = report_of([outcomes[row][name] for row in rows])
            parts.append(RowsDone(name, None if everyone else at(*rows), report))
    return RowDelivery("version", selections, parts)


def fault_status(fault: tuple[str, str, str] | None) -> DispatchStatus:
    assert fault is not None
    return DispatchStatus(fault[0])
