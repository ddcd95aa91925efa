"""Topics: names of dot-separated segments, one of which tells the category of the message."""

from enum import StrEnum
from functools import lru_cache

MAX_TOPIC_LENGTH = 500


class MessageCategory(StrEnum):
    """What a message is: a fact (event), an order (command) or a wish (intent).

    Example: `MessageCategory.from_topic("dev.order.events.v1") is MessageCategory.EVENT`.
    """

    EVENT = "event"
    COMMAND = "command"
    INTENT = "intent"

    @classmethod
    def from_topic(cls, topic: str) -> "MessageCategory | None":
        """The category that the last telling segment names, or None: `topic_fault` says why."""
        return category_of(topic)


_BY_SEGMENT = {word: category for category in MessageCategory for word in (category.value, f"{category.value}s")}


def category_of(topic: str) -> MessageCategory | None:
    """Read the category from a topic; None if there is none, or if the topic is malformed."""
    # The length is checked outside the cache, which would otherwise hold topics of any size.
    return _category_of(topic) if len(topic) <= MAX_TOPIC_LENGTH else None


@lru_cache(maxsize=65_536)
def _category_of(topic: str) -> MessageCategory | None:
    return next(filter(None, map(category_of_segment, reversed(segments_of(topic)))), None)


def category_of_segment(segment: str) -> MessageCategory | None:
    """The category that a folded segment names, if it is one of the telling words."""
    return _BY_SEGMENT.get(segment)


def segments_of(topic: str) -> list[str]:
    """The case-folded segments of a topic; an empty list if the topic is malformed.

    Malformed means: an empty segment, too long, or a character that does not print (a line break, say, or half
    of a surrogate pair, which no UTF-8 consumer downstream could take).
    """
    segments = topic.casefold().split(".")
    return segments if "" not in segments and len(topic) <= MAX_TOPIC_LENGTH and topic.isprintable() else []


def topic_fault(topic: str) -> str | None:
    """Say why a topic has no category, in a sentence for the one who sent it."""
    if category_of(topic) is not None:
        return None
    if len(topic) > MAX_TOPIC_LENGTH:
        return f"The topic has {len(topic)} characters; {MAX_TOPIC_LENGTH} are allowed."
    if not topic.isprintable():
        return f"The topic {topic!a} has a character that does not print."
    if "" in topic.split("."):
        return f"The topic '{topic}' has an empty segment."
    return f"No segment of the topic '{topic}' is one of event(s), command(s), intent(s)."
