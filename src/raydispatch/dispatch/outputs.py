"""What a handler returned, read: messages that go on, and a reply."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid5

from raydispatch.dispatch.outcome import Reply
from raydispatch.errors import InvalidParameter
from raydispatch.messages.envelope import Envelope


class Outputs(NamedTuple):
    """Envelopes with the topics they go to, in the order the handler gave them, and its reply if there is one."""

    envelopes: tuple[Envelope[Any], ...] = ()
    reply: Reply | None = None

    @property
    def topics(self) -> tuple[str, ...]:
        """Where the envelopes go."""
        return tuple([envelope.topic for envelope in self.envelopes])


NOTHING = Outputs()


def read_output(output: object, parent: Envelope[Any], dispatcher_id: str) -> Outputs:
    """Read a topic, an envelope, a reply, or a list of these; anything else raises `InvalidParameter`.

    The ids of messages that go on are derived from their parent, the dispatcher and their number: when a handler runs
    again, its outputs have the same ids, and whoever remembers ids handles them once.
    """
    if output is None:
        return NOTHING
    if isinstance(output, Reply):
        return Outputs((), output)
    single = isinstance(output, str | Envelope)
    items: Sequence[object] = (output,) if single else output if isinstance(output, list | tuple) else ()
    replies = [item for item in items if isinstance(item, Reply)]
    rest = [item for item in items if not isinstance(item, Reply)]
    if (not items and not isinstance(output, list | tuple)) or not all(map(_has_topic, rest)) or len(replies) > 1:
        raise InvalidParameter(
            f"it returned {_shape(output)}; a handler returns None, a topic, an Envelope with a topic, a Reply, or a "
            f"list of these with one Reply at most"
        )
    envelopes = [_envelope(item, parent, dispatcher_id, index) for index, item in enumerate(rest)]
    return Outputs(tuple(envelopes), replies[0] if replies else None)


def _has_topic(item: object) -> bool:
    topic = item.topic if isinstance(item, Envelope) else item
    return isinstance(topic, str) and bool(topic.strip())


def _envelope(item: Any, parent: Envelope[Any], dispatcher_id: str, index: int) -> Envelope[Any]:
    if isinstance(item, str):
        return parent.sent_on(item, uuid5(parent.message_id, f"{dispatcher_id}/{index}"))
    envelope: Envelope[Any] = item
    return envelope.caused_by(parent)


def _shape(output: object) -> str:
    if isinstance(output, list | tuple) and not isinstance(output, Reply):
        return f"a {type(output).__name__} of {', '.join(sorted({_shape(item) for item in output})) or 'nothing'}"
    if isinstance(output, str):
        return "a topic" if output.strip() else "a blank topic"
    if isinstance(output, Envelope):
        return "an Envelope" if _has_topic(output) else "an Envelope without a topic"
    return type(output).__name__
