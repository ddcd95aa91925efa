"""Topics: their category, their segments, and what is said of a bad one."""

import pytest

from raydispatch.messages.topic import MAX_TOPIC_LENGTH, MessageCategory, category_of, segments_of, topic_fault


@pytest.mark.parametrize(
    ("topic", "category"),
    [
        ("dev.order.events.v1", MessageCategory.EVENT),
        ("dev.order.event", MessageCategory.EVENT),
        ("commands.order", MessageCategory.COMMAND),
        ("a.command.b", MessageCategory.COMMAND),
        ("a.intents", MessageCategory.INTENT),
        ("intent", MessageCategory.INTENT),
        ("DEV.Order.EVENTS.v1", MessageCategory.EVENT),
    ],
)
def test_a_telling_segment_names_the_category(topic: str, category: MessageCategory) -> None:
    assert category_of(topic) is category
    assert MessageCategory.from_topic(topic) is category
    assert topic_fault(topic) is None


def test_the_last_telling_segment_wins() -> None:
    assert category_of("dev.events.replay.commands.v1") is MessageCategory.COMMAND
    assert category_of("dev.commands.audit.events.v1") is MessageCategory.EVENT


@pytest.mark.parametrize("topic", ["dev.order.v1", "eventual.order", "my-events", ""])
def test_a_topic_without_a_telling_segment_has_no_category(topic: str) -> None:
    assert category_of(topic) is None


@pytest.mark.parametrize("topic", ["", ".", "a..events", ".events", "events.", "a.ev\nents.events", "\ud800.events"])
def test_a_malformed_topic_has_neither_segments_nor_category(topic: str) -> None:
    assert segments_of(topic) == []
    assert category_of(topic) is None


def test_segments_are_case_folded() -> None:
    assert segments_of("Dev.STRAßE.Events") == ["dev", "strasse", "events"]


def test_the_longest_allowed_topic_is_read_and_one_more_character_is_not() -> None:
    longest = "events." + "x" * (MAX_TOPIC_LENGTH - len("events."))

    assert category_of(longest) is MessageCategory.EVENT
    assert category_of(longest + "x") is None
    assert segments_of(longest + "x") == []


@pytest.mark.parametrize(
    ("topic", "fault"),
    [
        ("events." + "x" * 500, "The topic has 507 characters; 500 are allowed."),
        ("a.\n.events", "The topic 'a.\\n.events' has a character that does not print."),
        ("a..events", "The topic 'a..events' has an empty segment."),
        ("", "The topic '' has an empty segment."),
        ("a.b", "No segment of the topic 'a.b' is one of event(s), command(s), intent(s)."),
    ],
)
def test_the_fault_of_a_topic_is_a_sentence(topic: str, fault: str) -> None:
    assert topic_fault(topic) == fault
