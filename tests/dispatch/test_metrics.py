from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydispatch.dispatch.metrics import LATENCY_BUCKETS_MS, DispatchMetrics, MetricsRecorder, bucket_labels
from raydispatch.dispatch.outcome import DispatchStatus, Outcome
from raydispatch.messages.topic import MessageCategory

EVENT = MessageCategory.EVENT


def test_nothing_dispatched_is_all_well() -> None:
    metrics = DispatchMetrics()

    assert (metrics.success_rate, metrics.error_rate, metrics.avg_latency_ms) == (1.0, 0.0, 0.0)


def test_recording_gives_new_metrics_and_leaves_the_old() -> None:
    before = DispatchMetrics()

    after = before.record_dispatch(duration_ms=4.0, success=True, category=EVENT, dispatcher_id="a", topic="t")
    later = after.record_dispatch(duration_ms=8.0, success=False, dispatcher_id="a", error_message="down")

    assert [m.total_dispatches for m in (before, after, later)] == [0, 1, 2]
    assert (later.min_latency_ms, later.max_latency_ms, later.avg_latency_ms) == (4.0, 8.0, 6.0)
    assert later.success_rate == later.error_rate == 0.5
    assert later.category_metrics == {EVENT: 1}
    assert later.topic_metrics == {"t": 1}
    part = later.get_dispatcher_metrics("a")
    assert part is not None
    assert (part.success_count, part.error_count, part.execution_count) == (1, 1, 2)
    assert (part.last_error_message, part.error_rate, part.avg_latency_ms) == ("down", 0.5, 6.0)


@pytest.mark.parametrize(
    ("duration", "label"), [(0.0, "le_1ms"), (1.0, "le_1ms"), (1.1, "le_5ms"), (1e4, "le_10000ms"), (1e5, "gt_10000ms")]
)
def test_a_duration_is_counted_in_the_one_bucket_that_holds_it(duration: float, label: str) -> None:
    histogram = DispatchMetrics().record_dispatch(duration_ms=duration, success=True).latency_histogram

    assert {name: count for name, count in histogram.items() if count} == {label: 1}
    assert list(histogram) == bucket_labels(LATENCY_BUCKETS_MS)


def test_a_refusal_is_no_execution() -> None:
    recorder = MetricsRecorder()

    recorder.record("t", EVENT, DispatchStatus.CIRCUIT_OPEN, 1.0, 0.1, [Outcome("a", DispatchStatus.CIRCUIT_OPEN)])

    part = recorder.snapshot().dispatcher_metrics["a"]
    assert (part.execution_count, part.refused_count, part.latency.count) == (0, 1, 0)
    assert part.last_execution_at is None


def test_topics_beyond_the_limit_are_counted_together() -> None:
    recorder = MetricsRecorder(most_topics=2)

    for topic in ["a", "b", "c", "d", "a"]:
        recorder.record(topic, EVENT, DispatchStatus.SUCCESS, 1.0, 0.1, ())

    assert recorder.snapshot().topic_metrics == {"a": 2, "b": 1, "(other)": 2}


def test_a_snapshot_does_not_change_afterwards() -> None:
    recorder = MetricsRecorder()
    before = recorder.snapshot()

    recorder.record("t", EVENT, DispatchStatus.SUCCESS, 1.0, 0.1, ())

    assert before == DispatchMetrics(latency=before.latency, routing=before.routing)
    assert before.total_dispatches == 0


# Counting in several places, and adding up


def test_an_outcome_alone_is_counted_for_its_dispatcher_and_is_no_dispatch() -> None:
    recorder = MetricsRecorder()

    recorder.record_outcome(Outcome("a", DispatchStatus.SUCCESS, attempts=1, duration_ms=3.0))
    recorder.record_outcome(Outcome("a", DispatchStatus.CIRCUIT_OPEN, error_message="open"))

    metrics = recorder.snapshot()
    part = metrics.dispatcher_metrics["a"]
    assert (metrics.total_dispatches, metrics.statuses, metrics.topic_metrics) == (0, {}, {})
    assert part.statuses == {DispatchStatus.SUCCESS: 1, DispatchStatus.CIRCUIT_OPEN: 1}
    assert (part.execution_count, part.refused_count, part.latency.count) == (1, 1, 1)
    assert part.last_error_message == "open"


START = datetime(2026, 1, 1, tzinfo=UTC)

outcomes = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(DispatchStatus),
    st.integers(0, 3),
    st.integers(0, 20_000).map(float),
    st.sampled_from([None, "down", "lost"]),
).map(lambda o: Outcome(o[0], o[1], attempts=o[2], duration_ms=o[3], error_message=o[4]))
Dispatch = tuple[str | None, MessageCategory | None, DispatchStatus, float, float, list[Outcome]]
dispatches = st.tuples(
    st.sampled_from([None, "t1", "t2", "t3"]),
    st.sampled_from([None, *MessageCategory]),
    st.sampled_from(DispatchStatus),
    st.integers(0, 20_000).map(float),
    st.integers(0, 5).map(float),
    st.lists(outcomes, max_size=3),
)


def without_last_error(metrics: DispatchMetrics) -> dict[str, Any]:
    """The last one of several places is not known: their clocks say when something ran, not when it failed."""
    return metrics.model_dump(exclude={"dispatcher_metrics": {"__all__": {"last_error_message"}}})


@given(parts=st.lists(st.lists(dispatches, max_size=6), max_size=4))
def test_adding_up_what_several_have_counted_is_as_if_one_had_counted_it_all(parts: list[list[Dispatch]]) -> None:
    alone, total = MetricsRecorder(), MetricsRecorder()
    at = START
    for part in parts:
        one = MetricsRecorder()
        for dispatch in part:
            at += timedelta(seconds=1)
            for recorder in (one, alone):
                recorder.record(*dispatch, at=at)
        total.add(one.snapshot())

    found, wanted = total.snapshot(), alone.snapshot()

    assert without_last_error(found) == without_last_error(wanted)
    for name, dispatcher in wanted.dispatcher_metrics.items():
        known = found.dispatcher_metrics[name].last_error_message
        assert (known is None) == (dispatcher.last_error_message is None)


@given(parts=st.lists(st.lists(dispatches, max_size=4), min_size=2, max_size=4), data=st.data())
def test_the_order_of_adding_changes_no_count(parts: list[list[Dispatch]], data: st.DataObject) -> None:
    snapshots = []
    for number, part in enumerate(parts):
        recorder = MetricsRecorder()
        for dispatch in part:
            recorder.record(*dispatch, at=START + timedelta(seconds=number))
        snapshots.append(recorder.snapshot())
    there, back = MetricsRecorder(), MetricsRecorder()

    for snapshot in snapshots:
        there.add(snapshot)
    for snapshot in data.draw(st.permutations(snapshots)):
        back.add(snapshot)

    assert without_last_error(there.snapshot()) == without_last_error(back.snapshot())


def test_of_two_last_errors_the_one_who_ran_later_has_the_word() -> None:
    early, late, total = MetricsRecorder(), MetricsRecorder(), MetricsRecorder()
    for recorder, error, seconds in ((early, "early", 1), (late, "late", 2)):
        outcome = Outcome("a", DispatchStatus.DISPATCHER_ERROR, attempts=1, error_message=error)
        recorder.record("t", EVENT, outcome.status, 1.0, 0.1, [outcome], START + timedelta(seconds=seconds))

    total.add(late.snapshot())
    total.add(early.snapshot())

    part = total.snapshot().dispatcher_metrics["a"]
    assert (part.last_error_message, part.last_execution_at) == ("late", START + timedelta(seconds=2))


def test_adding_up_keeps_to_the_limit_of_topics() -> None:
    total = MetricsRecorder(most_topics=2)

    for topics in (["a", "b"], ["b", "c"], ["d"]):
        recorder = MetricsRecorder()
        for topic in topics:
            recorder.record(topic, EVENT, DispatchStatus.SUCCESS, 1.0, 0.1, ())
        total.add(recorder.snapshot())

    assert total.snapshot().topic_metrics == {"a": 1, "b": 2, "(other)": 2}


def test_adding_leaves_what_was_added_as_it_was() -> None:
    before = DispatchMetrics().record_dispatch(duration_ms=4.0, success=True, dispatcher_id="a", topic="t")
    copy = before.model_copy(deep=True)

    total = MetricsRecorder(before)
    total.add(before)

    assert before == copy
    assert total.snapshot().total_dispatches == 2
