"""The resources of a deployment, with the properties of the platform's API, and their state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# The key of an output that a resource has while this command changes it in several calls.
UNDER_WAY = "under way"
OWNER = "tsx:name"  # the tag that names the deployment that owns a resource
State = Literal["ready", "changing", "failed"]


@dataclass(frozen=True)
class Ref:
    """A value of another resource that is known only after that resource is created.

    An example is the number of a function's version.
    """

    id: str  # id of that resource in this deployment
    attribute: str  # the attribute's name in CloudFormation's `Fn::GetAtt`, or `Ref`
    content_id: str = ""  # identifies the value before it is known, for names that depend on it

    def __str__(self) -> str:
        return f"({self.attribute} of {self.content_id or self.id}, known after it is created)"


@dataclass(frozen=True)
class Resource:
    """A wanted resource.

    `kind` is CloudFormation's type. `properties` are its properties, which equal those of the API.
    Tags are not among them: `tags` are set on every resource that can carry them.
    """

    id: str  # fixed across plans; letters and digits, like logical ids of CloudFormation
    kind: str
    name: str  # name on the platform
    properties: Mapping[str, Any]
    needs: tuple[str, ...] = ()  # ids of resources that must exist first
    tags: Mapping[str, str] = field(default_factory=dict)
    change_settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the change only
    timeout_s: float = 0.0  # seconds after which a change is given up; 0: the limit of its kind
    notes: tuple[str, ...] = ()  # notes for the user, shown below the plan

    @property
    def short_kind(self) -> str:
        return self.kind.rpartition("::")[2]


def numbered_resources(
    id: str, kind: str, names: Iterable[str], needs: tuple[str, ...] = (), *, start: int = 0
) -> list[Resource]:
    """Return existing resources with numbered ids; only their names are known."""
    return [
        Resource(f"{id}{number}", kind, name, {}, needs) for number, name in enumerate(names, start)
    ]


@dataclass(frozen=True)
class Observed:
    """An existing resource."""

    name: str
    properties: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)  # values for Refs
    state: State = "ready"
    reason: str = ""  # why it failed, as the platform reports it


@dataclass(frozen=True)
class Traits:
    """The facts about a kind of resource that a plan needs."""

    fixed: frozenset[str] = frozenset()  # properties that only a new resource can change
    unreported: frozenset[str] = frozenset()  # properties that the platform does not report
    removable: frozenset[str] = frozenset()  # properties that are removed if they are unwanted
    # Properties from which unknown inner keys are removed, such as a variable added by hand.
    exact: frozenset[str] = frozenset()
    # The text for the user about an interrupted change; empty if AWS continues the change.
    when_interrupted: str = ""
    can_update_failed: bool = False  # whether a failed resource is updated instead of replaced
    can_adopt: bool = False  # whether an existing resource without an owner is taken over
    is_tagged: bool = True  # whether the resource carries and reports tags


def ids_of(resources: Iterable[Resource]) -> tuple[str, ...]:
    return tuple(resource.id for resource in resources)


def owned(observed: Observed | None, name: str) -> Observed | None:
    """Return an existing resource if it belongs to the deployment of this name."""
    return observed if observed is not None and observed.tags.get(OWNER) == name else None


def digest(value: Any, length: int = 8) -> str:
    """Return the first digits of a SHA-256, for names; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
