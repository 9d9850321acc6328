"""A workflow's specification: YAML with `models`, the nodes that are models, and `dag`, the edges
(contract 1.6).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeAlias

from pydantic.dataclasses import dataclass as checked_dataclass

from tsx_archiver.errors import InvalidConfig
from tsx_archiver.metadata.keys import KEBAB_KEYS, Count, Positive, keys_of, read_keys
from tsx_archiver.metadata.safeyaml import load_yaml_file
from tsx_archiver.names import is_model_name, shown

Edges: TypeAlias = Mapping[
    str, tuple[str, ...]
]  # for each node, in the order of the specification, those that its output goes to
MOST_NODES = 256  # each is at least one process
JOINT = "__"  # a node's model is called WORKFLOW__NODE

URL = "url"


class InvalidSpec(InvalidConfig):
    """The specification cannot be used."""


class CycleInSpec(InvalidSpec):
    """The graph of the workflow has a cycle."""


@checked_dataclass(frozen=True, config=KEBAB_KEYS)
class NodeSettings:
    """Settings in the specification for one node's model, or for all; None if not set."""

    min_workers: Positive | None = None
    max_workers: Positive | None = None
    batch_size: Positive | None = None
    max_batch_delay: Count | None = None  # ms
    retry_attempts: Count | None = None  # further attempts after the first
    timeout_ms: Positive | None = None  # of one attempt


NO_SETTINGS = NodeSettings()


@dataclass(frozen=True)
class Node:
    """`url` names the archive of its model; None where the node is a function of the workflow's
    handler.
    """

    name: str
    url: str | None
    settings: NodeSettings


@dataclass(frozen=True)
class WorkflowSpec:
    """A checked specification: no cycle, no edge to an unknown node.

    `nodes` and `edges` keep the order of the specification.
    """

    nodes: Mapping[str, Node]
    edges: Edges
    settings: NodeSettings = NO_SETTINGS  # what holds for every model that says nothing of its own
    problems: tuple[str, ...] = ()
    parents: Mapping[str, tuple[str, ...]] = field(init=False)
    leaves: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", parents_of(self.edges))
        object.__setattr__(self, "leaves", leaves_of(self.edges))

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes.values() if node.url is None)


def read_spec(path: Path, *, has_handler: bool) -> WorkflowSpec:
    """Raises InvalidSpec, CycleInSpec."""
    try:
        data = load_yaml_file(path)
    except InvalidConfig as error:  # by its name: where it was unpacked means nothing to a client
        raise InvalidSpec(error.message.replace(str(path), path.name, 1)) from error
    return parse_spec(data, source=path.name, has_handler=has_handler)


def parse_spec(data: Any, *, source: str, has_handler: bool) -> WorkflowSpec:
    """From plain values.

    A value that cannot be used, and a key that is not known, are problems and count as absent.
    """
    if not isinstance(data, dict):
        raise InvalidSpec(
            f"{source} holds {_kind(data)} instead of keys and values: models: ... and dag: ..."
        )
    problems: list[str] = []
    models, settings = _models(data.get("models"), source, problems)
    edges = _edges(data.get("dag"), source)
    cycle = find_cycle(edges)
    if cycle is not None:
        raise CycleInSpec(
            f"{source}: its dag has a cycle: {' -> '.join(cycle)}. Remove one of these edges."
        )
    problems += [
        f"model {name} is not used in the dag, so it is not loaded"
        for name in models
        if name not in edges
    ]
    nodes = {name: models.get(name) or Node(name, None, settings) for name in edges}
    unknown = [
        name
        for name, node in nodes.items()
        if node.url is None and not (has_handler and name.isidentifier())
    ]
    if unknown:
        raise InvalidSpec(f"{source}: {_not_there(unknown[0], models, has_handler)}")
    return WorkflowSpec(nodes, edges, settings, tuple(problems))


def _models(data: Any, source: str, problems: list[str]) -> tuple[dict[str, Node], NodeSettings]:
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise InvalidSpec(
            f"{source}: models holds {_kind(data)}, not one model for each key. Write models: and,"
            " below it, NAME: and url: FILE.mar"
        )
    known = keys_of(NodeSettings)
    shared = {
        key: value for key, value in data.items() if key in known or not isinstance(value, dict)
    }
    settings = _settings(shared, "models", problems)
    nodes = {}
    for name, own in data.items():
        if name in shared:
            continue
        url = own.get(URL)
        if not isinstance(url, str) or not url:
            raise InvalidSpec(
                f"{source}: model {shown(str(name))} has no url. Name its archive: url: FILE.mar"
            )
        rest = {key: value for key, value in own.items() if key != URL}
        nodes[str(name)] = Node(
            str(name), url, _settings(rest, f"models.{name}", problems, settings)
        )
    return nodes, settings


def _settings(
    data: Mapping[Any, Any], under: str, problems: list[str], shared: NodeSettings = NO_SETTINGS
) -> NodeSettings:
    """Those of `shared` where `data` has none that can be used."""
    settings, faults = read_keys(NodeSettings, data, under, others=(URL,), closed=True)
    problems += faults
    return replace(
        shared, **{name: value for name, value in vars(settings).items() if value is not None}
    )


def _edges(data: Any, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(data, dict) or not data:
        raise InvalidSpec(
            f"{source}: dag holds {_kind(data)}, not the edges between the nodes. Write dag: and,"
            " below it, NODE: [NEXT, ...]"
        )
    edges: dict[str, tuple[str, ...]] = {}
    for name, following in data.items():
        following = (
            [] if following is None else [following] if isinstance(following, str) else following
        )
        if not isinstance(following, list):
            raise InvalidSpec(
                f"{source}: dag.{name} holds {_kind(following)}. Write a list of nodes: {name}:"
                " [NEXT, ...]"
            )
        edges[str(name)] = tuple(map(str, following))
    edges = complete(edges)
    for name in edges:
        if not is_model_name(name):
            raise InvalidSpec(
                f"{source}: the node {shown(name)} has an invalid name: letters, digits, '_', '-'"
                " and '.' only."
            )
    if len(edges) > MOST_NODES:
        raise InvalidSpec(
            f"{source} has {len(edges)} nodes; a workflow may have {MOST_NODES}. Put several steps"
            " into one model."
        )
    return edges


def _not_there(name: str, models: Mapping[str, Node], has_handler: bool) -> str:
    near = difflib.get_close_matches(name, list(models), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    if has_handler:
        return (
            f"the node {name} of the dag is neither a model under models nor a valid name of a"
            f" function.{hint}"
        )
    return (
        f"the node {name} of the dag is not a model under models, and the workflow has no handler"
        f" that could define it as a function.{hint}"
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def complete(edges: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """With an entry for each node that is only ever named as a successor, and each edge once."""
    nodes = dict.fromkeys(edges) | {
        node: None for following in edges.values() for node in following
    }
    return {node: tuple(dict.fromkeys(edges.get(node, ()))) for node in nodes}


def parents_of(edges: Edges) -> dict[str, tuple[str, ...]]:
    """For each node, the nodes whose output it takes; none for those that take the request
    itself.
    """
    parents: dict[str, list[str]] = {node: [] for node in edges}
    for node, following in edges.items():
        for successor in following:
            parents[successor].append(node)
    return {node: tuple(above) for node, above in parents.items()}


def leaves_of(edges: Edges) -> tuple[str, ...]:
    """The nodes whose output is the workflow's answer."""
    return tuple(node for node, following in edges.items() if not following)


def find_cycle(edges: Edges) -> Sequence[str] | None:
    """Nodes that feed one another in a circle, the first one again at the end; None where there is
    no such circle.
    """
    try:
        TopologicalSorter(parents_of(edges)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None
