import asyncio

from tests.actors.fakes import DEFAULT_RULE, FakeHandle, FakeReplica, run, table_of, turns, until

from raydispatch.actors.circuit import CLOSED, Circuit
from raydispatch.actors.plan import Plan, Rule, Target
from raydispatch.actors.targets import Infirmary, targets_of
from raydispatch.dispatch.breaker import CircuitState

OPEN = Circuit(CircuitState.OPEN, 60.0)


def plan_of(replicas: dict[str, list[str]], rule: Rule = DEFAULT_RULE, **circuits: Circuit) -> Plan:
    table = table_of(*((name, "**", 0) for name in replicas))
    handles = {name: {one: FakeHandle(FakeReplica) for one in ones} for name, ones in replicas.items()}
    return Plan(1, table, handles, dict.fromkeys(replicas, rule), circuits)


def ids(target: Target) -> list[str]:
    return [endpoint.endpoint_id for endpoint in target.endpoints.all()]


# Targets


def test_each_dispatcher_of_a_plan_is_a_target_with_its_replicas_rule_and_circuit() -> None:
    rule = DEFAULT_RULE._replace(tries=7)

    targets = targets_of(plan_of({"a": ["a-1", "a-2"], "b": []}, rule, b=OPEN), {})

    assert {name: ids(target) for name, target in targets.items()} == {"a": ["a-1", "a-2"], "b": []}
    assert targets["a"].rule == rule
    assert (targets["a"].circuit, targets["b"].circuit.state) == (CLOSED, CircuitState.OPEN)


def test_what_is_known_keeps_its_health_and_its_counts() -> None:
    before = targets_of(plan_of({"a": ["a-1", "a-2"]}), {})
    sick, _ = before["a"].endpoints.all()
    before["a"].endpoints.begun(sick, 3)
    before["a"].endpoints.quarantine("a-1")

    after = targets_of(plan_of({"a": ["a-1", "a-3"]}), before)

    assert after["a"] is before["a"]
    assert ids(after["a"]) == ["a-1", "a-3"]
    assert after["a"].endpoints.all()[0] is sick
    assert (sick.in_flight, after["a"].endpoints.healthy_count) == (3, 1)


def test_a_replica_that_leaves_is_there_until_it_has_ended_what_it_has() -> None:
    before = targets_of(plan_of({"a": ["a-1"]}), {})
    (busy,) = before["a"].endpoints.all()
    before["a"].endpoints.begun(busy)

    after = targets_of(plan_of({"a": []}), before)
    during = ids(after["a"])
    after["a"].endpoints.ended(busy)

    assert (during, ids(after["a"])) == (["a-1"], [])


def test_who_goes_by_an_older_plan_keeps_its_dispatchers() -> None:
    before = targets_of(plan_of({"a": ["a-1"], "b": ["b-1"]}), {})

    after = targets_of(plan_of({"a": ["a-1"]}), before)

    assert (set(before), set(after)) == ({"a", "b"}, {"a"})


def test_a_circuit_that_the_plan_does_not_mention_is_closed() -> None:
    targets = targets_of(plan_of({"a": []}, a=OPEN), {})

    after = targets_of(plan_of({"a": []}), targets)

    assert after["a"].circuit == CLOSED


# The infirmary


class Ward:
    """Two dispatchers of one replica each, and who asks the sick ones."""

    def __init__(self) -> None:
        self.replicas = {"a": FakeReplica(), "b": FakeReplica()}
        self.handles = {name: _handle_of(one) for name, one in self.replicas.items()}
        self.targets = {name: Target(name) for name in self.replicas}
        for name, target in self.targets.items():
            target.endpoints.join(f"{name}-1", self.handles[name])
        self.changes = 0
        self.infirmary = Infirmary(lambda: self.targets, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def fall_ill(self, name: str) -> None:
        self.targets[name].endpoints.quarantine(f"{name}-1")
        self.infirmary.watch()

    def is_well(self, name: str) -> bool:
        return not self.targets[name].endpoints.is_any_quarantined


def _handle_of(replica: FakeReplica) -> FakeHandle:
    return FakeHandle(lambda: replica)


def test_the_sick_are_asked_until_they_are_well() -> None:
    async def story() -> None:
        ward = Ward()
        ward.replicas["a"].is_well = False

        ward.fall_ill("a")
        await until(lambda: ward.handles["a"].count("ping") >= 2)
        ill = not ward.is_well("a")
        ward.replicas["a"].is_well = True
        await until(lambda: ward.is_well("a"))
        await until(lambda: ward.changes == ward.handles["a"].count("ping"))

        assert (ill, ward.handles["b"].count("ping")) == (True, 0)

    run(story())


def test_when_all_are_well_nobody_is_asked_any_more() -> None:
    async def story() -> None:
        ward = Ward()

        ward.fall_ill("a")
        await until(lambda: ward.infirmary._watching is not None and ward.infirmary._watching.done())
        ward.infirmary.watch()
        await turns()

        assert ward.handles["a"].count("ping") == 1

    run(story())


def test_one_who_falls_ill_later_is_asked_by_the_same_round() -> None:
    async def story() -> None:
        ward = Ward()
        ward.replicas["a"].is_well = False
        ward.fall_ill("a")
        watching = ward.infirmary._watching
        await until(lambda: ward.handles["a"].count("ping"))

        ward.fall_ill("b")
        await until(lambda: ward.is_well("b"))

        assert ward.infirmary._watching is watching

    run(story())


def test_one_who_is_gone_is_not_waited_for() -> None:
    async def story() -> None:
        ward = Ward()
        ward.handles["a"].crash(for_good=True)
        ward.fall_ill("a")
        await until(lambda: ward.handles["a"].count("ping"))

        del ward.targets["a"]

        assert ward.infirmary._watching is not None
        await asyncio.wait_for(ward.infirmary._watching, 5)

    run(story())
