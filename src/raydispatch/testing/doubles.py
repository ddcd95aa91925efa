"""A double of an engine: the same routes and dispatchers, with a clock, faults and handlers of the test's own."""

import dataclasses
from collections.abc import Mapping

from raydispatch.bus.engine import DispatchEngine
from raydispatch.bus.publishing import OnResult
from raydispatch.dispatch.clock import Clock
from raydispatch.dispatch.handler import Handler, HandlerSource
from raydispatch.dispatch.registry import DispatcherRegistry
from raydispatch.errors import NotRegistered
from raydispatch.settings import EngineSettings
from raydispatch.testing.faults import FaultInjector


def double(
    engine: DispatchEngine,
    *,
    clock: Clock | None = None,
    faults: FaultInjector | None = None,
    settings: EngineSettings | None = None,
    replace: Mapping[str, HandlerSource] | None = None,
    on_result: OnResult | None = None,
) -> DispatchEngine:
    """Another engine like this one, which may be frozen or not; the double is not, so that a test can add to it.

    It has its own handlers of classes, breakers, metrics and dead letters. Middleware, filters and handlers that are
    objects are the same ones, with all that they remember. What is not given is as in the engine.

    Example: `async with double(app.engine, replace={"mail": RecordingHandler()}) as engine: ...`
    """
    twin = DispatchEngine(
        engine.name,
        settings=settings or engine.settings,
        registry=_registry(engine, replace or {}, faults),
        logger=engine.logger,
        clock=clock or engine.clock,
        on_result=on_result or engine.on_result,
        on_pressure=engine.on_pressure,
    )
    for middleware in engine.middleware:
        twin.add_middleware(middleware)
    for condition in engine.filters:
        twin.add_filter(condition)
    return twin


def _registry(
    engine: DispatchEngine, replace: Mapping[str, HandlerSource], faults: FaultInjector | None
) -> DispatcherRegistry:
    specs = {spec.dispatcher_id: spec for spec in engine.registry.dispatchers()}
    for dispatcher_id, source in replace.items():
        if dispatcher_id not in specs:
            raise NotRegistered("dispatcher", dispatcher_id)
        Handler(source)  # Raises now, at the place of the mistake, if this is nothing to call.
    registry = DispatcherRegistry()
    for dispatcher_id, spec in specs.items():
        source = replace.get(dispatcher_id, spec.source)
        if faults is not None:
            source = faults.wrap(dispatcher_id, source)
        registry.add_dispatcher(dataclasses.replace(spec, source=source))
    for route in engine.registry.routes():
        registry.add_route(route)
    return registry
