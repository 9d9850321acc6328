"""The resources of a deployment, with the properties of the platform's API, and their current
state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# among the outputs of what the command itself brings on its way in several calls, and watches
UNDER_WAY = "under way"
State = Literal["ready", "changing", "failed"]


@dataclass(frozen=True)
class Ref:
    """A value of another resource that is known only after it is created, such as the number of a
    function's version.
    """

    id: str  # of that resource, in this deployment
    attribute: str  # as CloudFormation's `Fn::GetAtt` names it; `Ref` for what `Ref` gives
    of: str = ""  # what decides the value, where names are made of it

    def __str__(self) -> str:
        return f"({self.attribute} of {self.of or self.id}, known after it is created)"


@dataclass(frozen=True)
class Resource:
    """A wanted resource.

    `kind` is CloudFormation's type and `properties` are its properties, which are those of the API:
    what is carried out and what is exported are the same. They hold no tags: `tags` are put on
    everything that can carry them.
    """

    # the same in each plan of this deployment: letters and digits, as CloudFormation wants logical
    # ids
    id: str
    kind: str
    name: str  # on the platform
    properties: Mapping[str, Any]
    needs: tuple[str, ...] = ()  # ids of what must be there before it
    tags: Mapping[str, str] = field(default_factory=dict)
    how: Mapping[str, Any] = field(
        default_factory=dict
    )  # how a change of it is made; nothing of that is there afterwards
    patience: float = 0.0  # seconds after which a change of it is given up; 0: those of its kind
    notes: tuple[str, ...] = ()  # what a person should know of it, shown below the plan

    @property
    def short_kind(self) -> str:
        return self.kind.rpartition("::")[2]


def numbered(
    id: str, kind: str, names: Iterable[str], needs: tuple[str, ...] = (), *, start: int = 0
) -> list[Resource]:
    """Existing resources, of which only the names are known."""
    return [
        Resource(f"{id}{number}", kind, name, {}, needs) for number, name in enumerate(names, start)
    ]


@dataclass(frozen=True)
class Observed:
    """An existing resource."""

    name: str
    properties: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)  # what a Ref may ask for
    state: State = "ready"
    reason: str = ""  # why it failed, in the platform's words


@dataclass(frozen=True)
class Traits:
    """The properties of a kind of resource that a plan needs."""

    fixed: frozenset[str] = (
        frozenset()
    )  # properties that cannot be changed: another value makes another resource
    unseen: frozenset[str] = frozenset()  # properties that the platform does not tell again
    removable: frozenset[str] = (
        frozenset()
    )  # properties that are removed where they are not wanted; others belong to the platform
    exact: frozenset[str] = (
        frozenset()
    )  # of these also what stands within them, such as a variable added by hand
    # what becomes of a change that is left while it goes on, where AWS does not go on by itself
    left: str = ""
    updates_failed: bool = False  # a failed one is updated, not replaced: part of it still answers
    adopted: bool = False  # one that is there and belongs to no deployment is taken over
    is_tagged: bool = True  # whether it can carry tags, and shows them


def digest(value: Any, length: int = 8) -> str:
    """The beginning of a SHA-256, for names: the same for equal values, whatever the order of their
    keys.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
