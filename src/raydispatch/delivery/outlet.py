"""Outlets: where a handler's outputs go that leave the engine."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from raydispatch.errors import MissingExtra
from raydispatch.messages.envelope import Envelope


class Outlet(Protocol):
    """Publishes messages for others."""

    async def accept(self, outputs: Sequence[Envelope[Any]]) -> bool:
        """Publish all of them; whether that went well, after a few tries."""

    async def close(self) -> None:
        """Let go of it."""


def open_outlet(url: str, name: str) -> Outlet:
    """The outlet at `nats://host:4222`; it connects when the first message goes out."""
    try:
        home = import_module("raydispatch.journals.nats_outlet")
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "nats-py", "nats") from None
    outlet: Outlet = home.open_outlet(url, name)
    return outlet
