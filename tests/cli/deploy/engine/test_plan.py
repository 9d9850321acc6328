"""Plans: what has to be done between what is there and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.engine.plan import Plan, in_order, plan, resolved
from tsx_cli.deploy.engine.resources import Observed, Ref, Resource, Traits, digest

TRAITS = {
    "Fixed": Traits(fixed=frozenset({"size"})),
    "Blind": Traits(unseen=frozenset({"secret"})),
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


def as_it_is(wanted: Resource, **also: Any) -> Observed:
    return Observed(wanted.name, {**wanted.properties, **also}, wanted.tags)


def actions(planned: Plan) -> list[tuple[str, str]]:
    return [(change.action, change.resource.id) for change in planned.changes]


def test_what_is_not_there_is_created_after_what_it_needs() -> None:
    wanted = [
        resource("endpoint", needs=("config",)),
        resource("config", needs=("model",)),
        resource("model"),
    ]
    assert actions(plan(wanted, {}, TRAITS)) == [
        ("create", "model"),
        ("create", "config"),
        ("create", "endpoint"),
    ]


def test_what_the_platform_adds_of_its_own_is_no_difference() -> None:
    wanted = resource("a", size=1, variants=[{"name": "x"}])
    found = as_it_is(wanted, made="yesterday", variants=[{"name": "x", "weight": 1.0}])
    assert plan([wanted], {"a": found}, TRAITS).is_empty


def test_each_value_that_differs_is_named_with_its_old_and_new() -> None:
    wanted = resource("a", limits={"memory": 2, "cpu": 1}, tags={"tsx:name": "n"})
    changes = plan(
        [wanted], {"a": Observed("the-a", {"limits": {"memory": 1, "cpu": 1}})}, TRAITS
    ).changes
    reported = [(field.path, field.old, field.new) for field in changes[0].fields]
    assert reported == [("limits.memory", 1, 2), ("tags.tsx:name", None, "n")]
    assert changes[0].action == "update"


def test_a_property_that_cannot_be_changed_makes_another_resource() -> None:
    wanted = resource("a", "Fixed", size=2, note="new")
    assert actions(
        plan([wanted], {"a": Observed("the-a", {"size": 1, "note": "old"})}, TRAITS)
    ) == [("replace", "a")]
    assert actions(
        plan([wanted], {"a": Observed("the-a", {"size": 2, "note": "old"})}, TRAITS)
    ) == [("update", "a")]


def test_of_an_exact_property_also_what_stands_within_it_is_removed() -> None:
    found = Observed("the-a", {"env": {"vars": {"A": "1", "MORE": "2"}}, "size": 1, "other": 1})

    def fields(**properties: Any) -> list[tuple[str, Any, Any]]:
        traits = {"Plain": Traits(exact=frozenset({"env", "absent"}))}
        (change,) = plan([resource("a", **properties)], {"a": found}, traits).changes
        return [(field.path, field.old, field.new) for field in change.fields]

    assert fields(env={"vars": {"A": "1", "MORE": "2"}}) == []
    assert fields(env={"vars": {"A": "0"}}) == [
        ("env.vars.A", "1", "0"),
        ("env.vars.MORE", "2", None),
    ]
    assert fields() == [("env.vars.A", "1", None), ("env.vars.MORE", "2", None)]


def test_what_the_platform_does_not_tell_again_is_not_compared() -> None:
    wanted = resource("a", "Blind", secret="x", tags={"k": "v"})
    assert plan([wanted], {"a": Observed("the-a", {}, {"k": "v"})}, TRAITS).is_empty
    assert plan(
        [resource("b", "Bare", tags={"k": "v"})], {"b": Observed("the-b", {})}, TRAITS
    ).is_empty


def test_what_has_failed_is_made_again_and_says_why() -> None:
    wanted = resource("a")
    change = plan(
        [wanted], {"a": replace(as_it_is(wanted), state="failed", reason="no ping")}, TRAITS
    ).changes[0]
    assert (change.action, change.reason) == ("replace", "it has failed: no ping")


def test_a_number_is_no_truth_value() -> None:
    wanted = resource("a", on=True)
    assert actions(plan([wanted], {"a": Observed("the-a", {"on": 1})}, TRAITS)) == [("update", "a")]


def test_what_is_not_wanted_goes_last_and_before_what_it_needs() -> None:
    wanted, old = resource("new"), [resource("model"), resource("config", needs=("model",))]
    planned = plan([wanted], {}, TRAITS, [(each, as_it_is(each)) for each in old])
    assert actions(planned) == [("create", "new"), ("delete", "config"), ("delete", "model")]


def test_a_value_that_is_known_only_later_differs_until_then() -> None:
    version, alias = (
        resource("version"),
        resource("alias", needs=("version",), number=Ref("version", "Version")),
    )
    later = plan([version, alias], {"alias": Observed("the-alias", {"number": "7"})}, TRAITS)
    assert actions(later) == [("create", "version"), ("update", "alias")]
    assert later.as_json()["changes"][1]["fields"] == [
        {"path": "number", "old": "7", "new": {"known_after": "version", "attribute": "Version"}}
    ]
    there = Observed("the-version", {}, outputs={"Version": "7"})
    assert plan(
        [version, alias],
        {"version": there, "alias": Observed("the-alias", {"number": "7"})},
        TRAITS,
    ).is_empty


def test_values_of_others_are_put_in_wherever_they_stand() -> None:
    outputs = {"a": {"Arn": "arn:a"}}
    assert resolved({"x": [Ref("a", "Arn"), {"y": (Ref("a", "Arn"),)}], "z": 1}, outputs) == {
        "x": ["arn:a", {"y": ["arn:a"]}],
        "z": 1,
    }
    with pytest.raises(KeyError):
        resolved(Ref("b", "Arn"), outputs)


def test_resources_that_need_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="in a cycle:"):
        in_order([resource("a", needs=("b",)), resource("b", needs=("a",))])
    with pytest.raises(ValueError, match="have the same id"):
        in_order([resource("a"), resource("a")])


def test_names_hang_on_what_is_said_and_not_on_its_order() -> None:
    assert (
        digest({"a": 1, "b": [1, 2]})
        == digest({"b": [1, 2], "a": 1})
        != digest({"a": 1, "b": [2, 1]})
    )
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
    """What a platform would hold, in memory: each change is carried out at once."""

    def __init__(self, there: Mapping[str, Mapping[str, Any]]) -> None:
        self.there = {id: dict(properties) for id, properties in there.items()}

    def plan(self, wanted: Mapping[str, Mapping[str, Any]]) -> Plan:
        ids = list(wanted)
        desired = [
            resource(id, "Fixed", tuple(ids[:place]), **properties)
            for place, (id, properties) in enumerate(wanted.items())
        ]
        found = {id: Observed(f"the-{id}", properties) for id, properties in self.there.items()}
        unwanted = [(resource(id, "Fixed"), each) for id, each in found.items() if id not in wanted]
        return plan(desired, found, TRAITS, unwanted)

    def apply(self, planned: Plan, steps: int | None = None) -> None:
        for change in planned.changes[:steps]:
            if change.action == "delete":
                del self.there[change.resource.id]
            elif change.action != "same":
                kept = {} if change.action == "replace" else self.there.get(change.resource.id, {})
                self.there[change.resource.id] = kept | change.resource.properties


@given(there=WORLDS, wanted=WORLDS)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(
    there: dict[str, Any], wanted: dict[str, Any]
) -> None:
    world = World(there)
    world.apply(world.plan(wanted))
    assert world.plan(wanted).is_empty
    assert set(world.there) == set(wanted)


@given(there=WORLDS, wanted=WORLDS, steps=st.integers(0, 8))
def test_a_run_that_broke_off_anywhere_ends_as_one_that_did_not(
    there: dict[str, Any], wanted: dict[str, Any], steps: int
) -> None:
    whole, broken = World(there), World(there)
    whole.apply(whole.plan(wanted))
    broken.apply(broken.plan(wanted), steps)
    broken.apply(broken.plan(wanted))
    assert broken.there == whole.there
