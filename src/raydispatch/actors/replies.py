"""Replies from further down a chain, waiting in the controller for the process that asked."""

import asyncio
from uuid import UUID

from raydispatch.dispatch.outcome import Reply


class Mailbox:
    """Replies for one gateway, until it collects them; the last 10,000."""

    def __init__(self) -> None:
        self._letters: list[tuple[UUID, Reply]] = []
        self._arrived = asyncio.Event()

    def put(self, letter: tuple[UUID, Reply]) -> None:
        """Keep one."""
        self._letters = [*self._letters[-9_999:], letter]
        self._arrived.set()

    def __len__(self) -> int:
        return len(self._letters)

    async def take(self, seconds: float) -> list[tuple[UUID, Reply]]:
        """All that are there; waits for the first."""
        try:
            await asyncio.wait_for(self._arrived.wait(), seconds)
        except TimeoutError:
            return []
        self._arrived.clear()
        letters, self._letters = self._letters, []
        return letters
