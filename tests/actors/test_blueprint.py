import threading
from typing import Any

import pytest
import ray
from ray import cloudpickle
from tests.actors.fakes import EVENT

from raydispatch import DispatchEngine, Envelope
from raydispatch.actors import system
from raydispatch.actors.blueprint import PortableSpec, blueprint_of, check_resources, explained
from raydispatch.actors.plan import Rule
from raydispatch.delivery.subscription import Rules
from raydispatch.dispatch.dispatcher import DispatcherSpec
from raydispatch.errors import InvalidParameter, StartFailed
from raydispatch.settings import Delivery, EngineSettings, JournalSettings, PoisonPolicy, RetrySettings


async def bill(envelope: Envelope[Any]) -> None:
    """Does nothing."""


async def around(envelope: Envelope[Any], following: Any) -> Any:
    return await following(envelope)


def spec_of(handler: Any = bill, **options: Any) -> DispatcherSpec:
    return DispatcherSpec("billing", handler, EVENT, **options)


def portable(**options: Any) -> PortableSpec:
    return PortableSpec.of(spec_of(**options), ())


def locked() -> Any:
    """A handler that holds what no other process can have."""
    lock = threading.Lock()

    async def handle(envelope: Envelope[Any]) -> None:
        with lock:
            pass

    return handle


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Those of the cluster: one, and one that is lost."""
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0, "memory": 8e9, "disk": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e12, "tape": 1.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return nodes


# Travelling


def test_a_blueprint_is_the_whole_engine() -> None:
    engine = DispatchEngine("shop", settings=EngineSettings(max_hops=3))
    for name in ("billing", "stock"):
        engine.dispatcher(name, topics="dev.**", category=EVENT, replicas=2)(bill)

    blueprint = blueprint_of(engine)

    assert blueprint.table.version == engine.table.version
    assert [(name, spec.dispatcher_id, spec.replicas) for name, spec in blueprint.specs.items()] == [
        ("billing", "billing", 2),
        ("stock", "stock", 2),
    ]
    assert blueprint.engine.max_hops == 3


def test_the_middleware_travels_with_each_handler() -> None:
    engine = DispatchEngine("shop")
    engine.add_middleware(around)
    engine.dispatcher("billing", topics="dev.**", category=EVENT)(bill)

    spec, middleware = cloudpickle.loads(blueprint_of(engine).specs["billing"].handler)

    assert (spec.dispatcher_id, spec.source, middleware) == ("billing", bill, (around,))


@pytest.mark.parametrize(("handler", "middleware"), [(locked(), ()), (bill, (locked(),))])
def test_what_cannot_be_pickled_is_refused_with_a_sentence(handler: Any, middleware: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PortableSpec.of(spec_of(handler), middleware)

    words = str(caught.value)
    assert words.startswith("The dispatcher 'billing' cannot be sent to another process (TypeError: ")
    assert words.endswith("Open files, connections and locks belong into a class that makes them in start().")


def test_a_routers_rule_is_read_from_the_spec() -> None:
    plain = portable()
    strict = portable(at_most_once=True, reject_when_full=True, retry=RetrySettings(tries=7))

    assert (plain.rule, strict.rule) == (
        Rule(False, False, 3, way=Rules(Delivery(), RetrySettings())),
        Rule(True, True, 7, way=Rules(Delivery(), RetrySettings(tries=7))),
    )
    assert portable(retry=None).rule.tries == 1


def test_how_a_dispatcher_gets_what_comes_from_the_journal_is_in_its_rule() -> None:
    delivery = Delivery.reliable_exclusive(window=7)

    rule = portable(delivery=delivery, poison=PoisonPolicy.BLOCK, retry=None, replicas=3).rule

    # Each replica is a consumer, with a window of its own.
    assert rule.way == Rules(delivery, None, PoisonPolicy.BLOCK)


# The journal's place


@pytest.mark.parametrize(
    ("url", "is_up", "home"),
    [
        ("sqlite:///var/orders.db", True, "node-7"),
        ("sqlite:///var/orders.db", False, None),
        ("nats://localhost:4222", True, None),
        (None, True, None),
    ],
)
def test_a_journal_in_a_file_has_its_home_where_the_program_runs(
    monkeypatch: pytest.MonkeyPatch, url: str | None, is_up: bool, home: str | None
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: is_up)
    monkeypatch.setattr(ray, "get_runtime_context", _Context)
    settings = EngineSettings(journal=JournalSettings(url=url) if url else None)

    blueprint = blueprint_of(DispatchEngine("shop", settings=settings))

    assert (blueprint.home, blueprint.engine) == (home, settings)


class _Context:
    def get_node_id(self) -> str:
        return "node-7"


def test_a_system_that_starts_ray_itself_keeps_its_journal_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    up, made = [False], []

    def begin(name: str, settings: object, lease: bool) -> Any:
        raise LookupError

    def note(engine: DispatchEngine) -> Any:
        made.append(blueprint_of(engine))
        return made[-1]

    monkeypatch.setattr(ray, "is_initialized", lambda: up[0])
    monkeypatch.setattr(ray, "get_runtime_context", _Context)
    monkeypatch.setattr(system, "use_ray", lambda: up.__setitem__(0, True))
    monkeypatch.setattr(system, "blueprint_of", note)
    monkeypatch.setattr(system, "_new_controller", begin)
    settings = EngineSettings(journal=JournalSettings(url="sqlite:///var/orders.db"))

    with pytest.raises(LookupError):
        system.DispatchSystem.start(DispatchEngine("shop", settings=settings))

    assert made[0].home == "node-7"


def test_ray_is_told_only_what_was_asked_for() -> None:
    asked = {
        "num_cpus": 2,
        "num_gpus": 1,
        "memory": 100,
        "resources": {"disk": 1.0},
        "runtime_env": {"pip": ["x"]},
        "scheduling_strategy": "SPREAD",
    }

    assert portable().options == {"num_cpus": 0.0, "num_gpus": 0.0}
    assert portable(**asked).options == asked


# Resources


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    "options", [{}, {"num_cpus": 4, "num_gpus": 1}, {"resources": {"disk": 2}}, {"memory": 8_000_000_000}]
)
def test_what_one_node_has_may_be_asked_for(options: dict[str, Any]) -> None:
    check_resources(portable(**options))


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"num_cpus": 8}, "8 CPU"),
        ({"num_cpus": 0.5, "num_gpus": 2}, "0.5 CPU, 2 GPU"),
        ({"resources": {"tape": 1}}, "1 tape"),
        ({"memory": 10**12}, "1e+12 memory"),
    ],
)
def test_what_no_living_node_has_is_named(options: dict[str, Any], asked: str) -> None:
    with pytest.raises(StartFailed) as caught:
        check_resources(portable(**options))

    assert caught.value.dispatcher_id == "billing"
    assert caught.value.reason.startswith(f"a replica needs {asked}, which no node of the Ray cluster has")


def test_two_nodes_together_are_not_enough(nodes: list[dict[str, Any]]) -> None:
    nodes.append({"Alive": True, "Resources": {"CPU": 8.0}})

    with pytest.raises(StartFailed, match="8 CPU, 1 GPU"):
        check_resources(portable(num_cpus=8, num_gpus=1))


# Explaining


@pytest.mark.parametrize(
    ("problems", "num_cpus", "words"),
    [
        (["ValueError: bad"], 1, "ValueError: bad"),
        (["A", "B"], 1, "A; B"),
        ([""], 0, "no answer in time"),
        ([""], 1, "no answer in time: most likely the cluster has too few free CPUs for 3 replicas"),
        (["", "A"], 1, "no answer in time; A"),
        (
            ["ModuleNotFoundError: No module named 'x'"],
            1,
            "ModuleNotFoundError: No module named 'x'. The workers don't have that module: install it there, or name it"
            " in runtime_env",
        ),
    ],
)
def test_a_failed_start_is_explained(problems: list[str], num_cpus: float, words: str) -> None:
    assert explained(problems, portable(num_cpus=num_cpus, replicas=3)) == words
