"""Workflow graphs: their parents, leaves and cycles."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import acyclic
from tsx_archiver.workflow import find_cycle, leaves_of, normalized_edges, parents_of

NAMES = st.sampled_from([f"n{number}" for number in range(8)])
GRAPHS = st.dictionaries(NAMES, st.lists(NAMES, max_size=4), max_size=8).map(normalized_edges)


@given(GRAPHS)
def test_every_successor_is_a_node_and_parents_mirror_edges(
    edges: dict[str, tuple[str, ...]],
) -> None:
    assert all(successor in edges for successors in edges.values() for successor in successors)
    parents = parents_of(edges)
    assert {(node, successor) for node in edges for successor in edges[node]} == {
        (parent, node) for node in parents for parent in parents[node]
    }
    assert all(len(set(successors)) == len(successors) for successors in edges.values())


@given(GRAPHS)
def test_a_graph_has_a_cycle_or_a_topological_order(
    edges: dict[str, tuple[str, ...]],
) -> None:
    cycle = find_cycle(edges)
    if cycle is not None:
        assert cycle[0] == cycle[-1]
        assert all(successor in edges[node] for node, successor in itertools.pairwise(cycle))
        return
    parents, visited = parents_of(edges), set[str]()
    while len(visited) < len(edges):
        ready_nodes = [
            node for node in edges if node not in visited and visited.issuperset(parents[node])
        ]
        assert ready_nodes
        visited.update(ready_nodes)


@given(acyclic().map(normalized_edges))
def test_an_acyclic_graph_has_no_cycle_and_ends_in_leaves(
    edges: dict[str, tuple[str, ...]],
) -> None:
    assert find_cycle(edges) is None
    assert leaves_of(edges)
    assert all(not edges[leaf] for leaf in leaves_of(edges))


def test_a_node_that_feeds_itself_is_a_cycle() -> None:
    assert find_cycle(normalized_edges({"a": ["a"]})) == ["a", "a"]
    assert find_cycle(normalized_edges({"a": ["b"], "b": ["c"], "c": ["b"]})) in (
        ["b", "c", "b"],
        ["c", "b", "c"],
    )


def test_a_chain_of_thousands_of_nodes_is_searched_without_recursion() -> None:
    chain = {f"n{number}": [f"n{number + 1}"] for number in range(2000)}
    assert find_cycle(normalized_edges(chain)) is None
    cycle = find_cycle(normalized_edges(chain | {"n2000": ["n0"]}))
    assert cycle is not None
    assert len(cycle) == 2002
