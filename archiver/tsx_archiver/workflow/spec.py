"""The specification of a workflow: YAML with `models`, and the edges of its graph in `dag`."""

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

# The successors of each node, in the order of the specification.
Edges: TypeAlias = Mapping[str, tuple[str, ...]]
MAX_NODES = 256  # Each node is at least one process.
SEPARATOR = "__"  # The name of a node's model is WORKFLOW__NODE.

URL = "url"


class InvalidSpec(InvalidConfig):
    """The specification cannot be used."""


class CycleInSpec(InvalidSpec):
    """The graph of the workflow has a cycle."""


@checked_dataclass(frozen=True, config=KEBAB_KEYS)
class NodeSettings:
    """The settings of one node's model, or the defaults of all models; None means not set."""

    min_workers: Positive | None = None
    max_workers: Positive | None = None
    batch_size: Positive | None = None
    max_batch_delay: Count | None = None  # ms
    retry_attempts: Count | None = None  # further attempts after the first
    timeout_ms: Positive | None = None  # limit of each attempt


NO_SETTINGS = NodeSettings()


@dataclass(frozen=True)
class Node:
    """A node of a workflow.

    Attributes:
        name: The name.
        url: The archive of its model, or None for a function of the workflow's handler.
        settings: The settings of its model.
    """

    name: str
    url: str | None
    settings: NodeSettings


@dataclass(frozen=True)
class WorkflowSpec:
    """A checked specification without cycles and unknown nodes.

    Attributes:
        nodes: The nodes in the order of the specification.
        edges: The successors of each node.
        settings: The settings of models without settings of their own.
        problems: Warnings about keys and values that are ignored.
        parents: The nodes whose output each node takes.
        leaves: The nodes whose output is the workflow's response.
    """

    nodes: Mapping[str, Node]
    edges: Edges
    settings: NodeSettings = NO_SETTINGS
    problems: tuple[str, ...] = ()
    parents: Mapping[str, tuple[str, ...]] = field(init=False)
    leaves: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", parents_of(self.edges))
        object.__setattr__(self, "leaves", leaves_of(self.edges))

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the nodes that are functions."""
        return tuple(node.name for node in self.nodes.values() if node.url is None)


def read_spec(path: Path, *, has_handler: bool) -> WorkflowSpec:
    """Read a specification.

    Raises:
        InvalidSpec: The specification cannot be used.
        CycleInSpec: The graph has a cycle.
    """
    try:
        data = load_yaml_file(path)
    except InvalidConfig as error:
        # Clients see this error, so it does not contain the path of the cache.
        raise InvalidSpec(error.message.replace(str(path), path.name, 1)) from error
    return parse_spec(data, source=path.name, has_handler=has_handler)


def parse_spec(data: Any, *, source: str, has_handler: bool) -> WorkflowSpec:
    """Check a specification; unknown keys and wrong values are ignored, and listed as problems.

    Raises:
        InvalidSpec: The specification cannot be used.
        CycleInSpec: The graph has a cycle.
    """
    if not isinstance(data, dict):
        raise InvalidSpec(
            f"{source} holds {_describe_type(data)} instead of keys and values: models: ... and"
            " dag: ..."
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
        raise InvalidSpec(f"{source}: {_unknown_node(unknown[0], models, has_handler)}")
    return WorkflowSpec(nodes, edges, settings, tuple(problems))


def _models(data: Any, source: str, problems: list[str]) -> tuple[dict[str, Node], NodeSettings]:
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise InvalidSpec(
            f"{source}: models holds {_describe_type(data)}, not one model for each key. Write"
            " models: and, below it, NAME: and url: FILE.mar"
        )
    known = keys_of(NodeSettings)
    default_keys = {
        key: value for key, value in data.items() if key in known or not isinstance(value, dict)
    }
    settings = _settings(default_keys, "models", problems)
    nodes = {}
    for name, entry in data.items():
        if name in default_keys:
            continue
        url = entry.get(URL)
        if not isinstance(url, str) or not url:
            raise InvalidSpec(
                f"{source}: model {shown(str(name))} has no url. Name its archive: url: FILE.mar"
            )
        keys = {key: value for key, value in entry.items() if key != URL}
        nodes[str(name)] = Node(
            str(name), url, _settings(keys, f"models.{name}", problems, settings)
        )
    return nodes, settings


def _settings(
    data: Mapping[Any, Any], section: str, problems: list[str], defaults: NodeSettings = NO_SETTINGS
) -> NodeSettings:
    """Read settings, with `defaults` for missing ones."""
    settings, faults = read_keys(NodeSettings, data, section, ignored=(URL,), closed=True)
    problems += faults
    return replace(
        defaults, **{name: value for name, value in vars(settings).items() if value is not None}
    )


def _edges(data: Any, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(data, dict) or not data:
        raise InvalidSpec(
            f"{source}: dag holds {_describe_type(data)}, not the edges between the nodes. Write"
            " dag: and, below it, NODE: [NEXT, ...]"
        )
    edges: dict[str, tuple[str, ...]] = {}
    for name, successors in data.items():
        successors = (
            []
            if successors is None
            else [successors]
            if isinstance(successors, str)
            else successors
        )
        if not isinstance(successors, list):
            raise InvalidSpec(
                f"{source}: dag.{name} holds {_describe_type(successors)}. Write a list of nodes:"
                f" {name}:"
                " [NEXT, ...]"
            )
        edges[str(name)] = tuple(map(str, successors))
    edges = normalized_edges(edges)
    for name in edges:
        if not is_model_name(name):
            raise InvalidSpec(
                f"{source}: the node {shown(name)} has an invalid name: letters, digits, '_', '-'"
                " and '.' only."
            )
    if len(edges) > MAX_NODES:
        raise InvalidSpec(
            f"{source} has {len(edges)} nodes; a workflow may have {MAX_NODES}. Put several steps"
            " into one model."
        )
    return edges


def _unknown_node(name: str, models: Mapping[str, Node], has_handler: bool) -> str:
    similar = difflib.get_close_matches(name, list(models), n=1)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    if has_handler:
        return (
            f"the node {name} of the dag is neither a model under models nor a valid name of a"
            f" function.{hint}"
        )
    return (
        f"the node {name} of the dag is not a model under models, and the workflow has no handler"
        f" that could define it as a function.{hint}"
    )


def _describe_type(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def normalized_edges(edges: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Add the nodes that occur only as successors, and remove duplicate edges."""
    nodes = dict.fromkeys(edges) | {
        node: None for successors in edges.values() for node in successors
    }
    return {node: tuple(dict.fromkeys(edges.get(node, ()))) for node in nodes}


def parents_of(edges: Edges) -> dict[str, tuple[str, ...]]:
    """Return the parents of each node; a node without parents takes the request."""
    parents: dict[str, list[str]] = {node: [] for node in edges}
    for node, successors in edges.items():
        for successor in successors:
            parents[successor].append(node)
    return {node: tuple(names) for node, names in parents.items()}


def leaves_of(edges: Edges) -> tuple[str, ...]:
    """Return the nodes without successors, whose output is the workflow's response."""
    return tuple(node for node, successors in edges.items() if not successors)


def find_cycle(edges: Edges) -> Sequence[str] | None:
    """Return the nodes of a cycle, with the first one repeated at the end, or None."""
    try:
        TopologicalSorter(parents_of(edges)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None
