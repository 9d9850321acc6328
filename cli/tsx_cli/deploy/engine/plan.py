"""The plan: the changes from the current state to the wanted one, as a pure function."""

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
# Values of switches such as TSX_DISABLE_TOKEN_AUTHORIZATION.
_SWITCH_VALUES = frozenset({"", "true", "false"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Field:
    """A value that changes. `path` has dots; `old` is None for a new value."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Change:
    action: Action
    resource: Resource
    observed: Observed | None
    fields: tuple[Field, ...] = ()
    reason: str = ""  # the reason of the change, if the fields do not show it

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "action": self.action,
            "id": self.resource.id,
            "kind": self.resource.kind,
            "name": self.resource.name,
            "fields": [
                {
                    "path": field.path,
                    "old": _redact(field.path, field.old),
                    "new": _redact(field.path, field.new),
                }
                for field in self.fields
            ],
        }
        if self.reason:
            data["reason"] = self.reason
        if self.resource.change_settings:
            data["how"] = _describe_refs(self.resource.change_settings)
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
        """Whether no existing resource is still changing, for instance after an earlier run."""
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
    """Compute the changes from the observed to the desired resources.

    1. A missing resource is created.
    2. A resource that differs is updated. It is replaced if it has failed, or if a property differs
       that cannot be changed.
    3. Unwanted resources are deleted last, in the reverse order of their creation.

    Args:
        desired: The wanted resources.
        observed: The wanted resources that exist, by id.
        traits: The traits of all kinds, by kind.
        unwanted: The existing resources of this deployment that are not wanted.
    """
    sorted_resources = sort_by_needs(desired)
    changing_ids: set[str] = set()  # ids of resources whose outputs will change
    changes = []
    for resource in sorted_resources:
        change = _compute_change(
            resource, observed, traits.get(resource.kind, Traits()), changing_ids
        )
        if change.action in ("create", "replace"):
            changing_ids.add(resource.id)
        changes.append(change)
    unwanted_by_id = {resource.id: (resource, existing) for resource, existing in unwanted}
    deletions = [
        unwanted_by_id[resource.id]
        for resource in reversed(
            sort_by_needs([resource for resource, _ in unwanted_by_id.values()])
        )
    ]
    changes += [Change("delete", resource, existing) for resource, existing in deletions]
    return Plan(tuple(changes))


def sort_by_needs(resources: Sequence[Resource]) -> list[Resource]:
    """Sort resources after those that they need, and otherwise keep their order.

    A needed resource that is not in the list exists already.

    Raises:
        ValueError: Two resources have the same id, or they need each other.
    """
    by_id = {resource.id: resource for resource in resources}
    if len(by_id) < len(resources):
        raise ValueError("two resources have the same id")
    sorter = TopologicalSorter(
        {resource.id: sorted(_needs(resource) & by_id.keys()) for resource in resources}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"resources depend on each other in a cycle: {error.args[1]}") from error
    position_by_id = {resource.id: number for number, resource in enumerate(resources)}
    sorted_resources = []
    while sorter.is_active():
        for id in sorted(sorter.get_ready(), key=position_by_id.__getitem__):
            sorted_resources.append(by_id[id])
            sorter.done(id)
    return sorted_resources


def _needs(resource: Resource) -> set[str]:
    """Return the ids of the resources that a resource needs, or to which its Refs refer."""

    def referred_ids(value: Any) -> set[str]:
        if isinstance(value, Ref):
            return {value.id}
        parts = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, (list, tuple))
            else ()
        )
        return {id for part in parts for id in referred_ids(part)}

    return {*resource.needs, *referred_ids(resource.properties)}


def _compute_change(
    resource: Resource, observed: Mapping[str, Observed], traits: Traits, changing_ids: set[str]
) -> Change:
    existing = observed.get(resource.id)
    if existing is None:
        fields = differences({}, resource.properties, observed, changing_ids)
        return Change("create", resource, None, tuple(fields))
    fields = differences(
        existing.properties,
        {key: value for key, value in resource.properties.items() if key not in traits.unreported},
        observed,
        changing_ids,
    )
    removed_keys = sorted(
        traits.removable & existing.properties.keys() - resource.properties.keys()
    )
    fields += [Field(key, existing.properties[key], None) for key in removed_keys]
    for key in sorted(traits.exact & existing.properties.keys()):
        fields += _additions(existing.properties[key], resource.properties.get(key), key)
    if traits.is_tagged:
        fields += [
            Field(f"tags.{key}", existing.tags.get(key), value)
            for key, value in resource.tags.items()
            if existing.tags.get(key) != value
        ]
    if existing.state == "failed":
        reason = f"it has failed: {existing.reason}" if existing.reason else "it has failed"
        return Change(
            "update" if traits.can_update_failed else "replace",
            resource,
            existing,
            tuple(fields),
            reason,
        )
    if not fields:
        return Change("same", resource, existing)
    is_fixed = any(field.path.split(".")[0] in traits.fixed for field in fields)
    return Change("replace" if is_fixed else "update", resource, existing, tuple(fields))


def differences(
    old: Any, new: Any, observed: Mapping[str, Observed], changing_ids: set[str], path: str = ""
) -> list[Field]:
    """Return the fields of `new` whose values differ from `old`.

    Keys that `new` does not have belong to the platform, and are ignored.
    """
    if isinstance(new, Ref):
        known_value = (
            None
            if new.id in changing_ids or new.id not in observed
            else observed[new.id].outputs.get(new.attribute)
        )
        return (
            []
            if known_value is not None and known_value == old
            else [Field(path, old, new if known_value is None else known_value)]
        )
    if isinstance(new, Mapping):
        old_items = old if isinstance(old, Mapping) else {}
        fields = []
        for key, value in new.items():
            fields += differences(
                old_items.get(key),
                value,
                observed,
                changing_ids,
                f"{path}.{key}" if path else str(key),
            )
        return fields if fields or isinstance(old, Mapping) or not path else [Field(path, old, new)]
    if isinstance(new, (list, tuple)):
        is_same = isinstance(old, (list, tuple)) and len(old) == len(new)
        is_same = is_same and not any(
            differences(*pair, observed, changing_ids, path) for pair in zip(old, new, strict=True)
        )
        return [] if is_same else [Field(path, old, new)]
    return (
        []
        if old == new and isinstance(old, bool) == isinstance(new, bool)
        else [Field(path, old, new)]
    )


def _additions(old: Any, new: Any, path: str) -> list[Field]:
    """Return the fields that only `old` has."""
    if not isinstance(old, Mapping):
        return [Field(path, old, None)] if new is None else []
    new_keys = new if isinstance(new, Mapping) else {}
    return [
        field
        for key, value in old.items()
        for field in _additions(value, new_keys.get(key), f"{path}.{key}")
    ]


def resolve_refs(value: Any, outputs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Replace the Refs of a value by the outputs to which they refer.

    Raises:
        KeyError: A resource or an attribute is missing.
    """
    return _replace_refs(value, lambda ref: outputs[ref.id][ref.attribute])


def _redact(path: str, value: Any) -> Any:
    return hide_secrets(_describe_refs(value), path.rpartition(".")[2])


def _describe_refs(value: Any) -> Any:
    return _replace_refs(value, lambda ref: {"known_after": ref.id, "attribute": ref.attribute})


def _replace_refs(value: Any, resolve: Callable[[Ref], Any]) -> Any:
    if isinstance(value, Ref):
        return resolve(value)
    if isinstance(value, Mapping):
        return {key: _replace_refs(item, resolve) for key, item in value.items()}
    return (
        [_replace_refs(item, resolve) for item in value]
        if isinstance(value, (list, tuple))
        else value
    )


def hide_secrets(value: Any, name: str = "") -> Any:
    """Hide the values of variables whose names mark them as secret, at any depth.

    A variable is a key with its value, a `{"name", "value"}` of Kubernetes, or a NAME=VALUE of
    docker.
    """
    if isinstance(value, Mapping):
        label = value.get("name")
        return {
            key: hide_secrets(item, label if key == "value" and isinstance(label, str) else key)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [hide_secrets(item) for item in value]
    if not isinstance(value, str) or value in _SWITCH_VALUES:
        return value
    assignment = _ASSIGNMENT.fullmatch(value)
    if assignment is not None and not name:
        return f"{assignment[1]}={hide_secrets(assignment[2], assignment[1])}"
    return HIDDEN if _SECRET.search(name) else value


def changed_parts(field: Field) -> list[tuple[str, Any, Any]]:
    """Return the parts of a field that change, as path, old and new value, without secrets.

    Items of lists such as containers and variables are compared by their names.
    """
    name = field.path.rpartition(".")[2]
    old, new = hide_secrets(field.old, name), hide_secrets(field.new, name)
    parts = list(_changed_parts(field.path, (field.old, old), (field.new, new)))
    # Without parts, only the order differs.
    return parts or [(field.path, old, new)]


def _changed_parts(
    path: str, old: tuple[Any, Any], new: tuple[Any, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Compare two values, each of which comes with a version without secrets."""
    (old_value, old_text), (new_value, new_text) = old, new
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        for key, value in new_value.items():
            yield from _changed_parts(
                f"{path}.{key}", (old_value.get(key), old_text.get(key)), (value, new_text[key])
            )
    elif (old_items := _items_by_name(old_value, old_text)) and (
        new_items := _items_by_name(new_value, new_text)
    ):
        for key in dict.fromkeys([*old_items, *new_items]):
            yield from _changed_parts(
                f"{path}.{key}", old_items.get(key, (None, None)), new_items.get(key, (None, None))
            )
    elif old_value != new_value:
        yield path, old_text, new_text


def _items_by_name(value: Any, text: Any) -> dict[str, tuple[Any, Any]]:
    is_named = isinstance(value, (list, tuple)) and all(
        isinstance(item, Mapping) and "name" in item for item in value
    )
    return (
        {item["name"]: (item, part) for item, part in zip(value, text, strict=True)}
        if is_named
        else {}
    )
