"""The graph of a workflow: which node feeds which. Pure functions, independent of what a node does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# For each node, in the order in which the specification names them, the nodes that its output goes to.
Edges: TypeAlias = Mapping[str, tuple[str, ...]]


def complete(edges: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """With an entry for each node that is only ever named as a successor, and each edge once."""
    nodes = dict.fromkeys(edges) | {node: None for following in edges.values() for node in following}
    return {node: tuple(dict.fromkeys(edges.get(node, ()))) for node in nodes}


def parents_of(edges: Edges) -> dict[str, tuple[str, ...]]:
    """For each node, the nodes whose output it takes; none for those that take the request itself."""
    parents: dict[str, list[str]] = {node: [] for node in edges}
    for node, following in edges.items():
        for successor in following:
            parents[successor].append(node)
    return {node: tuple(above) for node, above in parents.items()}


def leaves_of(edges: Edges) -> tuple[str, ...]:
    """The nodes whose output is the workflow's answer."""
    return tuple(node for node, following in edges.items() if not following)


def find_cycle(edges: Edges) -> Sequence[str] | None:
    """Nodes that feed one another in a circle, the first one again at the end; None where there is no such circle."""
    waiting = {node: len(above) for node, above in parents_of(edges).items()}
    free = [node for node, count in waiting.items() if not count]
    while free:
        node = free.pop()
        del waiting[node]
        for successor in edges[node]:
            waiting[successor] -= 1
            if not waiting[successor]:
                free.append(successor)
    if not waiting:
        return None
    # Each node that is left has a parent that is left, so a walk upwards meets a node again.
    parents = parents_of(edges)
    path = [next(iter(waiting))]
    while True:
        above = next(parent for parent in parents[path[-1]] if parent in waiting)
        if above in path:
            return [above, *reversed(path[path.index(above) :])]
        path.append(above)
