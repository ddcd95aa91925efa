"""A blueprint: an engine, frozen and ready to travel."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from raydispatch.actors.plan import Rule
from raydispatch.bus.durable import rules_of
from raydispatch.bus.engine import DispatchEngine
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.errors import InvalidParameter, StartFailed
from raydispatch.routing.table import RouteTable
from raydispatch.settings import EngineSettings


class Blueprint(NamedTuple):
    """What an engine is, ready to travel: its table, and each dispatcher with everything that its replicas need."""

    table: RouteTable
    specs: Mapping[str, "PortableSpec"]
    engine: EngineSettings
    home: str | None = None
    """The node of the journal's file, if it has one."""


class PortableSpec(NamedTuple):
    """A dispatcher's spec with the handler pickled by value, so that only its replicas must be able to load it."""

    dispatcher_id: str
    handler: bytes
    replicas: int
    concurrency: int
    rule: Rule
    breaker: Any
    options: Mapping[str, Any]
    """For Ray: where a replica may run."""

    @classmethod
    def of(cls, spec: DispatcherSpec, middleware: Sequence[Any]) -> "PortableSpec":
        """Pickle it, or say clearly why not."""
        try:
            handler = cloudpickle.dumps((spec, tuple(middleware)))
        except Exception as error:
            raise InvalidParameter(
                f"The dispatcher '{spec.dispatcher_id}' cannot be sent to another process ({type(error).__name__}: "
                f"{error}). Open files, connections and locks belong into a class that makes them in start()."
            ) from None
        options = {
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "memory": spec.memory,
            "resources": dict(spec.resources) or None,
            "runtime_env": dict(spec.runtime_env) if spec.runtime_env else None,
            "scheduling_strategy": spec.scheduling_strategy,
        }
        tries = spec.retry.tries if spec.retry else 1
        rule = Rule(spec.at_most_once, spec.reject_when_full, tries, spec.batch, spec.max_in_flight, rules_of(spec))
        given = {name: value for name, value in options.items() if value is not None}
        return cls(spec.dispatcher_id, handler, spec.replicas, spec.concurrency, rule, spec.breaker, given)


def blueprint_of(engine: DispatchEngine) -> Blueprint:
    """An engine, frozen and ready to travel."""
    table = engine.freeze()
    specs = {spec.dispatcher_id: PortableSpec.of(spec, engine.middleware) for spec in engine.registry.dispatchers()}
    journal = engine.settings.journal
    is_here = journal is not None and journal.url.startswith("sqlite:")
    home = ray.get_runtime_context().get_node_id() if is_here and ray.is_initialized() else None
    return Blueprint(table, specs, engine.settings, home)


def check_resources(spec: PortableSpec) -> None:
    """A replica that fits on no node would wait for ever."""
    wanted = {"CPU": spec.options.get("num_cpus", 0), "GPU": spec.options.get("num_gpus", 0)}
    wanted |= {"memory": spec.options.get("memory", 0), **spec.options.get("resources", {})}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        asked = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount)
        raise StartFailed(
            spec.dispatcher_id,
            f"a replica needs {asked}, which no node of the Ray cluster has: add one, or ask for less",
        )


def explained(problems: Sequence[str], spec: PortableSpec) -> str:
    """Why replicas did not start, and what to do."""
    words = "; ".join(problem or "no answer in time" for problem in problems)
    if "ModuleNotFoundError" in words:
        return f"{words}. The workers don't have that module: install it there, or name it in runtime_env"
    if words == "no answer in time" and spec.options.get("num_cpus"):
        return f"{words}: most likely the cluster has too few free CPUs for {spec.replicas} replicas"
    return words
