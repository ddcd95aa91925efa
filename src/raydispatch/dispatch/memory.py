"""What a dispatcher remembers of messages it has handled, so that a repeat does nothing twice."""

from uuid import UUID

from raydispatch.dispatch.outcome import DispatchStatus, Outcome

# To look up a status in a set takes longer than all the rest of `keep`: its hash is written in Python.
_SUCCESS = DispatchStatus.SUCCESS
_KEPT = frozenset((DispatchStatus.SUCCESS, DispatchStatus.PUBLISH_FAILED))


class OutcomeMemory:
    """Outcomes by message id, at most `capacity` of them.

    Two generations of dicts: when the young one is full, the old one goes as a whole. Evicting one by one from the
    front of a dict costs fifty times as much, since that front is full of holes.
    """

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[int, Outcome] = {}
        self._old: dict[int, Outcome] = {}

    def keep(self, message_id: UUID, outcome: Outcome) -> None:
        """Remember an outcome, if it is one that must not happen again."""
        if outcome.status is not _SUCCESS and outcome.status not in _KEPT:
            return
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[message_id.int] = outcome

    def recall(self, message_id: UUID) -> Outcome | None:
        """The stored outcome, marked as a repeat; None if there is none."""
        key = message_id.int
        outcome = self._young.get(key) or self._old.get(key)
        return None if outcome is None else outcome._replace(repeated=True)

    def __contains__(self, message_id: UUID) -> bool:
        return message_id.int in self._young or message_id.int in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
