import pytest

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
