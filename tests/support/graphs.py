"""Acyclic graphs for tests of workflows."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def acyclic(draw: st.DrawFn, most: int = 8) -> dict[str, list[str]]:
    """Draw a graph of nodes n0, n1 and so on in any order, with edges to later numbers."""
    count = draw(st.integers(1, most))
    later = {
        number: [f"n{later_number}" for later_number in range(number + 1, count)]
        for number in range(count)
    }
    edges = {
        f"n{number}": draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        for number, names in later.items()
    }
    return {node: edges[node] for node in draw(st.permutations(list(edges)))}
