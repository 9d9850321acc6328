"""Computes the changes from the current state to the wanted one: a pure function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from tsx_cli.deploy.engine.resources import Observed, Ref, Resource, Traits

Action = Literal["create", "update", "replace", "delete", "same"]

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"token|secret|passw(?:or)?d|credential|api_?key|access_?key|private_?key", re.IGNORECASE
)
_OPEN = frozenset({"", "true", "false"})  # a switch, such as TSX_DISABLE_TOKEN_AUTHORIZATION
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Field:
    """One value that changes. `path` is dotted, `old` None where there was none."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Change:
    action: Action
    resource: Resource
    observed: Observed | None
    fields: tuple[Field, ...] = ()
    reason: str = ""  # where the fields do not say it

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "action": self.action,
            "id": self.resource.id,
            "kind": self.resource.kind,
            "name": self.resource.name,
        }
        data["fields"] = [
            {
                "path": each.path,
                "old": _shown(each.path, each.old),
                "new": _shown(each.path, each.new),
            }
            for each in self.fields
        ]
        if self.reason:
            data["reason"] = self.reason
        if self.resource.how:
            data["how"] = _plain(self.resource.how)
        return data


@dataclass(frozen=True)
class Plan:
    """Changes, in an order in which they can be applied."""

    changes: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        return all(change.action == "same" for change in self.changes)

    @property
    def is_settled(self) -> bool:
        """Whether nothing of what is as it should be is still under way, such as a start that an
        earlier run has left.
        """
        return all(
            change.observed is None or change.observed.state == "ready" for change in self.changes
        )

    def count(self, *actions: Action) -> int:
        return sum(change.action in actions for change in self.changes)

    def as_json(self) -> dict[str, Any]:
        return {"changes": [change.as_json() for change in self.changes], "is_empty": self.is_empty}


def plan(
    desired: Sequence[Resource],
    observed: Mapping[str, Observed],
    traits: Mapping[str, Traits],
    unwanted: Iterable[tuple[Resource, Observed]] = (),
) -> Plan:
    """`observed` has, by id, what is there of the desired; `unwanted` is what else belongs to this
    deployment.

    1. What is wanted and not there is created.
    2. What is there and differs is updated, or replaced where a property that cannot be changed
       differs or it has failed.
    3. What is there and not wanted is deleted, last, and in the order opposite to its making.
    """
    ordered = in_order(desired)
    coming: set[str] = set()  # ids whose outputs are not those that are observed
    changes = []
    for resource in ordered:
        change = _change(resource, observed, traits.get(resource.kind, Traits()), coming)
        if change.action in ("create", "replace"):
            coming.add(resource.id)
        changes.append(change)
    leftover = {resource.id: (resource, found) for resource, found in unwanted}
    gone = [
        leftover[resource.id]
        for resource in reversed(in_order([resource for resource, _ in leftover.values()]))
    ]
    changes += [Change("delete", resource, found) for resource, found in gone]
    return Plan(tuple(changes))


def in_order(resources: Sequence[Resource]) -> list[Resource]:
    """Each after what it needs; otherwise as given.

    Needs that are not among them are met by what is there.
    """
    by_id = {resource.id: resource for resource in resources}
    if len(by_id) < len(resources):
        raise ValueError("two resources have the same id")
    sorter = TopologicalSorter({each.id: sorted(_needs(each) & by_id.keys()) for each in resources})
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"resources depend on each other in a cycle: {error.args[1]}") from error
    place = {resource.id: number for number, resource in enumerate(resources)}
    ordered = []
    while sorter.is_active():
        for ready in sorted(sorter.get_ready(), key=place.__getitem__):
            ordered.append(by_id[ready])
            sorter.done(ready)
    return ordered


def _needs(resource: Resource) -> set[str]:
    """What is named, and what a value of it is asked of."""

    def asked(value: Any) -> set[str]:
        if isinstance(value, Ref):
            return {value.id}
        inner = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, (list, tuple))
            else ()
        )
        return {id for each in inner for id in asked(each)}

    return {*resource.needs, *asked(resource.properties)}


def _change(
    resource: Resource, observed: Mapping[str, Observed], traits: Traits, coming: set[str]
) -> Change:
    found = observed.get(resource.id)
    if found is None:
        fields = differences({}, resource.properties, observed, coming)
        return Change("create", resource, None, tuple(fields))
    fields = differences(
        found.properties,
        {k: v for k, v in resource.properties.items() if k not in traits.unseen},
        observed,
        coming,
    )
    gone = sorted(traits.removable & found.properties.keys() - resource.properties.keys())
    fields += [Field(key, found.properties[key], None) for key in gone]
    for key in sorted(traits.exact & found.properties.keys()):
        fields += _additions(found.properties[key], resource.properties.get(key), key)
    if traits.is_tagged:
        fields += [
            Field(f"tags.{key}", found.tags.get(key), value)
            for key, value in resource.tags.items()
            if found.tags.get(key) != value
        ]
    if found.state == "failed":
        reason = f"it has failed: {found.reason}" if found.reason else "it has failed"
        return Change(
            "update" if traits.updates_failed else "replace", resource, found, tuple(fields), reason
        )
    if not fields:
        return Change("same", resource, found)
    if any(field.path.split(".")[0] in traits.fixed for field in fields):
        return Change("replace", resource, found, tuple(fields))
    return Change("update", resource, found, tuple(fields))


def differences(
    old: Any, new: Any, observed: Mapping[str, Observed], coming: set[str], path: str = ""
) -> list[Field]:
    """Where `new` says something else than `old`.

    What `new` does not name is the platform's own and no difference.
    """
    if isinstance(new, Ref):
        known = (
            None
            if new.id in coming or new.id not in observed
            else observed[new.id].outputs.get(new.attribute)
        )
        return (
            []
            if known is not None and known == old
            else [Field(path, old, new if known is None else known)]
        )
    if isinstance(new, Mapping):
        before = old if isinstance(old, Mapping) else {}
        found = []
        for key, value in new.items():
            found += differences(
                before.get(key), value, observed, coming, f"{path}.{key}" if path else str(key)
            )
        return found if found or isinstance(old, Mapping) or not path else [Field(path, old, new)]
    if isinstance(new, (list, tuple)):
        same = isinstance(old, (list, tuple)) and len(old) == len(new)
        same = same and not any(
            differences(*pair, observed, coming, path) for pair in zip(old, new, strict=True)
        )
        return [] if same else [Field(path, old, new)]
    return (
        []
        if old == new and isinstance(old, bool) == isinstance(new, bool)
        else [Field(path, old, new)]
    )


def _additions(old: Any, new: Any, path: str) -> list[Field]:
    """What `old` holds that `new` does not name."""
    if not isinstance(old, Mapping):
        return [Field(path, old, None)] if new is None else []
    named = new if isinstance(new, Mapping) else {}
    return [
        field
        for key, value in old.items()
        for field in _additions(value, named.get(key), f"{path}.{key}")
    ]


def resolved(value: Any, outputs: Mapping[str, Mapping[str, Any]]) -> Any:
    """`value` with what its Refs ask for. Raises KeyError for what is not there."""
    return _replaced(value, lambda ref: outputs[ref.id][ref.attribute])


def _shown(path: str, value: Any) -> Any:
    return hidden(_plain(value), path.rpartition(".")[2])


def _plain(value: Any) -> Any:
    return _replaced(value, lambda ref: {"known_after": ref.id, "attribute": ref.attribute})


def _replaced(value: Any, found: Callable[[Ref], Any]) -> Any:
    if isinstance(value, Ref):
        return found(value)
    if isinstance(value, Mapping):
        return {key: _replaced(each, found) for key, each in value.items()}
    return [_replaced(each, found) for each in value] if isinstance(value, (list, tuple)) else value


def hidden(value: Any, name: str = "") -> Any:
    """`value` without the texts of variables whose names say that they are secret, wherever in it
    they stand.

    A variable is a key with its value, a `{"name", "value"}` of Kubernetes, or a NAME=VALUE of
    docker.
    """
    if isinstance(value, Mapping):
        label = value.get("name")
        return {
            key: hidden(each, label if key == "value" and isinstance(label, str) else key)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [hidden(each) for each in value]
    if not isinstance(value, str) or value in _OPEN:
        return value
    assigned = _ASSIGNED.fullmatch(value)
    if assigned is not None and not name:
        return f"{assigned[1]}={hidden(assigned[2], assigned[1])}"
    return HIDDEN if _SECRET.search(name) else value


def narrowed(field: Field) -> list[tuple[str, Any, Any]]:
    """What of a field changes, without secrets: of containers and variables, whose lists are one
    value, each by its name.
    """
    name = field.path.rpartition(".")[2]
    old, new = hidden(field.old, name), hidden(field.new, name)
    return list(_narrowed(field.path, (field.old, old), (field.new, new))) or [
        (field.path, old, new)
    ]  # where only the order differs


def _narrowed(
    path: str, old: tuple[Any, Any], new: tuple[Any, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Each side with what is shown of it."""
    (was, was_shown), (will_be, shown) = old, new
    if isinstance(was, Mapping) and isinstance(will_be, Mapping):
        for key, value in will_be.items():
            yield from _narrowed(
                f"{path}.{key}", (was.get(key), was_shown.get(key)), (value, shown[key])
            )
    elif (before := _by_name(was, was_shown)) and (after := _by_name(will_be, shown)):
        for key in dict.fromkeys([*before, *after]):
            yield from _narrowed(
                f"{path}.{key}", before.get(key, (None, None)), after.get(key, (None, None))
            )
    elif was != will_be:
        yield path, was_shown, shown


def _by_name(value: Any, shown: Any) -> dict[str, tuple[Any, Any]]:
    is_named = isinstance(value, (list, tuple)) and all(
        isinstance(each, Mapping) and "name" in each for each in value
    )
    return (
        {each["name"]: (each, part) for each, part in zip(value, shown, strict=True)}
        if is_named
        else {}
    )
