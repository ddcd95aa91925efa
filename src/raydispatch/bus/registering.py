"""Registering routes and dispatchers: the same words for an engine and for a session."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, Unpack

from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.dispatch.handler import HandlerSource
from raydispatch.dispatch.registry import DispatcherOptions, check_id, make_spec
from raydispatch.errors import InvalidParameter
from raydispatch.messages.topic import MessageCategory
from raydispatch.routing.route import DispatchRoute

HandlerT = TypeVar("HandlerT", bound=HandlerSource)


class Registering(ABC):
    """What can be registered with. Who keeps it decides how it is kept."""

    @abstractmethod
    def _add(self, routes: Sequence[DispatchRoute], spec: DispatcherSpec | None = None) -> None:
        """Keep a dispatcher and routes, all or none."""

    def register_route(self, route: DispatchRoute) -> None:
        """Add a route; its dispatcher may come later."""
        if not isinstance(route, DispatchRoute):
            raise InvalidParameter(f"register_route takes a DispatchRoute, not {type(route).__name__}.")
        self._add((route,))

    def register_dispatcher(
        self,
        dispatcher_id: str,
        dispatcher: HandlerSource,
        category: MessageCategory,
        message_types: Collection[str] | None = None,
        **options: Unpack[DispatcherOptions],
    ) -> None:
        """Add a dispatcher: a function of one envelope (sync or async), or a class or object with `handle`."""
        self._add((), make_spec(dispatcher_id, dispatcher, category, message_types, **options))

    def dispatcher(
        self,
        dispatcher_id: str,
        *,
        topics: str | Sequence[str],
        category: MessageCategory,
        message_types: Collection[str] | None = None,
        priority: int = 0,
        **options: Unpack[DispatcherOptions],
    ) -> Callable[[HandlerT], HandlerT]:
        """Register the function or class below, with one route for each pattern in `topics`."""
        check_id("dispatcher_id", dispatcher_id)
        patterns = [topics] if isinstance(topics, str) else list(topics)
        routes = [
            DispatchRoute(
                route_id=dispatcher_id if len(patterns) == 1 else f"{dispatcher_id}-{number}",
                topic_pattern=pattern,
                message_category=category,
                dispatcher_id=dispatcher_id,
                priority=priority,
            )
            for number, pattern in enumerate(patterns, start=1)
        ]

        def register(handler: HandlerT) -> HandlerT:
            self._add(routes, make_spec(dispatcher_id, handler, category, message_types, **options))
            return handler

        return register
