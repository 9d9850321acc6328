"""The resources of a deployment, with the properties of the platform's API, and their state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# An output of a resource while this command moves it in several calls, and watches it.
UNDER_WAY = "under way"
State = Literal["ready", "changing", "failed"]


@dataclass(frozen=True)
class Ref:
    """A value of another resource that is known only after that is created.

    An example is the number of a function's version.
    """

    id: str  # id of that resource in this deployment
    attribute: str  # the attribute's name in CloudFormation's `Fn::GetAtt`, or `Ref`
    of: str = ""  # a text that decides the value, for names that depend on it

    def __str__(self) -> str:
        return f"({self.attribute} of {self.of or self.id}, known after it is created)"


@dataclass(frozen=True)
class Resource:
    """A wanted resource.

    `kind` is CloudFormation's type, and `properties` are its properties, which are also those of
    the API. They hold no tags: `tags` are set on every resource that can carry them.
    """

    id: str  # fixed across plans; letters and digits, like logical ids of CloudFormation
    kind: str
    name: str  # name on the platform
    properties: Mapping[str, Any]
    needs: tuple[str, ...] = ()  # ids of resources that must exist first
    tags: Mapping[str, str] = field(default_factory=dict)
    change_settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the change only
    timeout_s: float = 0.0  # seconds after which a change is given up; 0: those of its kind
    notes: tuple[str, ...] = ()  # notes for the user, shown below the plan

    @property
    def short_kind(self) -> str:
        return self.kind.rpartition("::")[2]


def numbered(
    id: str, kind: str, names: Iterable[str], needs: tuple[str, ...] = (), *, start: int = 0
) -> list[Resource]:
    """Return existing resources of which only the names are known, with numbered ids."""
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
    """What a plan needs to know about a kind of resource."""

    fixed: frozenset[str] = frozenset()  # properties that only a new resource can change
    unreported: frozenset[str] = frozenset()  # properties that the platform does not report
    removable: frozenset[str] = frozenset()  # properties that are removed if they are not wanted
    # Properties of which unknown inner keys are removed, such as a variable added by hand.
    exact: frozenset[str] = frozenset()
    when_interrupted: str = ""  # the fate of an interrupted change, if AWS does not continue it
    updates_failed: bool = False  # whether a failed resource is updated, not replaced
    adopts_unowned: bool = False  # whether an existing resource without an owner is taken over
    is_tagged: bool = True  # whether the resource carries and reports tags


def digest(value: Any, length: int = 8) -> str:
    """Return the first digits of a SHA-256, for names; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
