"""Plans: the changes that turn the observed resources into the desired ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.engine.plan import Plan, plan, resolve_refs, sort_by_needs
from tsx_cli.deploy.engine.resources import Observed, Ref, Resource, Traits, digest

TRAITS = {
    "Fixed": Traits(fixed=frozenset({"size"})),
    "Blind": Traits(unreported=frozenset({"secret"})),
    "Bare": Traits(is_tagged=False),
}


def resource(
    id: str,
    kind: str = "Plain",
    needs: tuple[str, ...] = (),
    tags: Mapping[str, str] | None = None,
    **properties: Any,
) -> Resource:
    return Resource(id, kind, f"the-{id}", properties, needs, tags or {})


def observed(resource: Resource, **more: Any) -> Observed:
    """Return the observation of a resource that has its desired state."""
    return Observed(resource.name, {**resource.properties, **more}, resource.tags)


def actions(planned: Plan) -> list[tuple[str, str]]:
    return [(change.action, change.resource.id) for change in planned.changes]


def plan_of(desired: Resource, properties: dict[str, Any], **tags: str) -> Plan:
    """Plan one resource that is observed with these properties."""
    return plan([desired], {desired.id: Observed(desired.name, properties, tags)}, TRAITS)


def test_a_missing_resource_is_created_after_those_that_it_needs() -> None:
    desired = [
        resource("endpoint", needs=("config",)),
        resource("config", needs=("model",)),
        resource("model"),
    ]
    assert actions(plan(desired, {}, TRAITS)) == [
        ("create", "model"),
        ("create", "config"),
        ("create", "endpoint"),
    ]


def test_properties_that_the_platform_adds_are_not_differences() -> None:
    desired = resource("a", size=1, variants=[{"name": "x"}])
    present = observed(desired, made="yesterday", variants=[{"name": "x", "weight": 1.0}])
    assert plan([desired], {"a": present}, TRAITS).is_empty


def test_each_value_that_differs_is_named_with_its_old_and_new() -> None:
    desired = resource("a", limits={"memory": 2, "cpu": 1}, tags={"tsx:name": "n"})
    (change,) = plan_of(desired, {"limits": {"memory": 1, "cpu": 1}}).changes
    fields = [(field.path, field.old, field.new) for field in change.fields]
    assert fields == [("limits.memory", 1, 2), ("tags.tsx:name", None, "n")]
    assert change.action == "update"


@pytest.mark.parametrize(("size", "action"), [(1, "replace"), (2, "update")])
def test_a_change_of_a_fixed_property_replaces_the_resource(size: int, action: str) -> None:
    desired = resource("a", "Fixed", size=2, note="new")
    assert actions(plan_of(desired, {"size": size, "note": "old"})) == [(action, "a")]


def test_parts_of_an_exact_property_that_are_not_specified_are_removed() -> None:
    present = Observed("the-a", {"env": {"vars": {"A": "1", "MORE": "2"}}, "size": 1, "other": 1})

    def fields(**properties: Any) -> list[tuple[str, Any, Any]]:
        traits = {"Plain": Traits(exact=frozenset({"env", "absent"}))}
        (change,) = plan([resource("a", **properties)], {"a": present}, traits).changes
        return [(field.path, field.old, field.new) for field in change.fields]

    assert fields(env={"vars": {"A": "1", "MORE": "2"}}) == []
    assert fields(env={"vars": {"A": "0"}}) == [
        ("env.vars.A", "1", "0"),
        ("env.vars.MORE", "2", None),
    ]
    assert fields() == [("env.vars.A", "1", None), ("env.vars.MORE", "2", None)]


def test_properties_that_the_platform_does_not_report_are_not_compared() -> None:
    tags = {"k": "v"}
    assert plan_of(resource("a", "Blind", secret="x", tags=tags), {}, **tags).is_empty
    assert plan_of(resource("b", "Bare", tags=tags), {}).is_empty


def test_a_failed_resource_is_recreated_with_a_reason() -> None:
    desired = resource("a")
    failed = replace(observed(desired), state="failed", reason="no ping")
    (change,) = plan([desired], {"a": failed}, TRAITS).changes
    assert (change.action, change.reason) == ("replace", "it has failed: no ping")


def test_a_number_differs_from_a_boolean() -> None:
    assert actions(plan_of(resource("a", on=True), {"on": 1})) == [("update", "a")]


def test_obsolete_resources_are_deleted_last_and_before_their_dependencies() -> None:
    desired, old = resource("new"), [resource("model"), resource("config", needs=("model",))]
    planned = plan([desired], {}, TRAITS, [(unwanted, observed(unwanted)) for unwanted in old])
    assert actions(planned) == [("create", "new"), ("delete", "config"), ("delete", "model")]


def test_an_unknown_value_is_a_difference() -> None:
    number = Ref("version", "Version")
    desired = [resource("version"), resource("alias", needs=("version",), number=number)]
    alias = {"alias": Observed("the-alias", {"number": "7"})}
    later = plan(desired, alias, TRAITS)
    assert actions(later) == [("create", "version"), ("update", "alias")]
    assert later.as_json()["changes"][1]["fields"] == [
        {"path": "number", "old": "7", "new": {"known_after": "version", "attribute": "Version"}}
    ]
    version = Observed("the-version", {}, outputs={"Version": "7"})
    assert plan(desired, {"version": version, **alias}, TRAITS).is_empty


def test_references_are_resolved_at_any_depth() -> None:
    outputs = {"a": {"Arn": "arn:a"}}
    assert resolve_refs({"x": [Ref("a", "Arn"), {"y": (Ref("a", "Arn"),)}], "z": 1}, outputs) == {
        "x": ["arn:a", {"y": ["arn:a"]}],
        "z": 1,
    }
    with pytest.raises(KeyError):
        resolve_refs(Ref("b", "Arn"), outputs)


def test_circular_dependencies_are_refused() -> None:
    with pytest.raises(ValueError, match="in a cycle:"):
        sort_by_needs([resource("a", needs=("b",)), resource("b", needs=("a",))])
    with pytest.raises(ValueError, match="have the same id"):
        sort_by_needs([resource("a"), resource("a")])


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    value = digest({"a": 1, "b": [1, 2]})
    assert value == digest({"b": [1, 2], "a": 1}) != digest({"a": 1, "b": [2, 1]})
    assert len(digest({})) == 8


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "y"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
WORLDS = st.dictionaries(
    st.sampled_from(["one", "two", "three", "four"]),
    st.dictionaries(st.sampled_from(["size", "p", "q"]), VALUES),
)


class World:
    """A platform in memory, where each change takes effect at once."""

    def __init__(self, resources: Mapping[str, Mapping[str, Any]]) -> None:
        self.resources = {id: dict(properties) for id, properties in resources.items()}

    def plan(self, properties_by_id: Mapping[str, Mapping[str, Any]]) -> Plan:
        ids = list(properties_by_id)
        desired = [
            resource(id, "Fixed", tuple(ids[:index]), **properties)
            for index, (id, properties) in enumerate(properties_by_id.items())
        ]
        present = {
            id: Observed(f"the-{id}", properties) for id, properties in self.resources.items()
        }
        unwanted = [
            (resource(id, "Fixed"), state)
            for id, state in present.items()
            if id not in properties_by_id
        ]
        return plan(desired, present, TRAITS, unwanted)

    def apply(self, planned: Plan, steps: int | None = None) -> None:
        for change in planned.changes[:steps]:
            id = change.resource.id
            if change.action == "delete":
                del self.resources[id]
            elif change.action != "same":
                former = {} if change.action == "replace" else self.resources.get(id, {})
                self.resources[id] = former | change.resource.properties


@given(present=WORLDS, desired=WORLDS, steps=st.integers(0, 8))
def test_the_next_run_completes_an_interrupted_one(
    present: dict[str, Any], desired: dict[str, Any], steps: int
) -> None:
    complete, broken = World(present), World(present)
    complete.apply(complete.plan(desired))
    assert complete.plan(desired).is_empty
    assert set(complete.resources) == set(desired)
    broken.apply(broken.plan(desired), steps)
    broken.apply(broken.plan(desired))
    assert broken.resources == complete.resources
