"""A route: messages of this category, on topics like that, of this type, go to that dispatcher."""

from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from raydispatch.messages.envelope import MAX_ID_LENGTH
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.pattern import Pattern, parse_pattern

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"\S")]


class DispatchRoute(BaseModel):
    """A frozen rule of the table.

    Example: `DispatchRoute(route_id="orders", topic_pattern="*.order.events.*",
    message_category=MessageCategory.EVENT, dispatcher_id="billing")`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    route_id: Identifier
    topic_pattern: str
    message_category: MessageCategory
    dispatcher_id: Identifier
    message_type: Identifier | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    enabled: bool = True
    description: str | None = None
    correlation_id: UUID | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("topic_pattern")
    @classmethod
    def _pattern_is_valid(cls, text: str) -> str:
        # InvalidPattern is no ValueError, so that pydantic lets it through with its caret.
        parse_pattern(text)
        return text

    @property
    def pattern(self) -> Pattern:
        """The parsed pattern."""
        return parse_pattern(self.topic_pattern)

    @property
    def order(self) -> tuple[object, ...]:
        """The one total order of matches: smaller comes first. Registration plays no part in it."""
        return (-self.priority, *self.pattern.specificity, self.route_id)

    def matches_topic(self, topic: str) -> bool:
        """Whether the pattern fits, whatever else the route asks for."""
        return self.pattern.matches(topic)

    def matches(self, topic: str, category: MessageCategory, message_type: str | None = None) -> bool:
        """Whether this route takes such a message (the dispatcher may still refuse its type)."""
        return (
            self.enabled
            and self.message_category is category
            and (self.message_type is None or self.message_type == message_type)
            and self.matches_topic(topic)
        )
