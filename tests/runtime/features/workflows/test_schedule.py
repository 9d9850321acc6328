"""The start and input of each workflow node, for any graph and completion order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import acyclic
from tsx_archiver.workflow import leaves_of, normalized_edges, parents_of
from tsx_runtime.features.workflows.schedule import (
    Input,
    Output,
    headers_for,
    join,
    merge,
    needed_nodes,
    startable_nodes,
)
from tsx_runtime.wire import MAX_COPIED_BYTES, Parts
from tsx_runtime.worker.codecs.requests import read_row


@given(acyclic().map(normalized_edges), st.randoms(use_true_random=False))
def test_every_node_starts_once_after_its_parents(
    edges: dict[str, tuple[str, ...]], random: Any
) -> None:
    parents = parents_of(edges)
    finished_nodes: list[str] = []
    running_nodes: list[str] = []
    while len(finished_nodes) < len(edges):
        for node in startable_nodes(parents, finished_nodes, [*finished_nodes, *running_nodes]):
            assert set(parents[node]) <= set(finished_nodes)
            assert node not in running_nodes
            running_nodes.append(node)
        assert running_nodes, "no node runs, but some are not done"
        assert set(finished_nodes) - needed_nodes(
            edges, finished_nodes, [*finished_nodes, *running_nodes]
        ) == {
            node
            for node in finished_nodes
            if edges[node]
            and all(child in finished_nodes or child in running_nodes for child in edges[node])
        }
        running_nodes.remove(node := random.choice(running_nodes))
        finished_nodes.append(node)
    assert set(leaves_of(edges)) <= needed_nodes(edges, finished_nodes, finished_nodes)


BODIES = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_\-.]{0,8}", fullmatch=True),
    st.binary(max_size=300),
    min_size=2,
    max_size=5,
)


@given(BODIES)
def test_the_handler_gets_the_outputs_of_several_parents_byte_for_byte(
    bodies: dict[str, bytes],
) -> None:
    boundary = b"0123456789abcdef" * 2
    joined = join(bodies, boundary)
    assert joined.content_type is not None
    meta = f"id\r\n\r\ncontent-type: {joined.content_type.decode()}\r\n"
    assert not isinstance(joined.body, Parts)
    row, _ = read_row(meta, joined.body, True)
    assert {name: bytes(value) for name, value in row.items()} == bodies
    assert list(row) == list(bodies)


def test_the_output_of_a_single_parent_is_unchanged() -> None:
    body = b"x" * 10
    joined = join({"a": body}, b"")
    assert joined == Input(body, None)
    assert joined.body is body


def test_large_outputs_are_joined_without_a_copy() -> None:
    outputs = {"a": b"1" * MAX_COPIED_BYTES, "b": b"2" * MAX_COPIED_BYTES}
    joined = join(outputs, b"bound")
    assert isinstance(joined.body, Parts)
    for output in outputs.values():
        assert any(piece is output for piece in joined.body.pieces)
    assert len(joined.body) == sum(map(len, joined.body.pieces))


def test_downstream_nodes_get_no_headers_about_the_clients_body() -> None:
    headers = [
        (b"Content-Type", b"image/png"),
        (b"content-length", b"3"),
        (b"x-mine", b"1"),
        (b"transfer-encoding", b"chunked"),
    ]
    assert headers_for(headers, None) == [(b"x-mine", b"1")]
    assert headers_for(headers, b"text/plain") == [
        (b"x-mine", b"1"),
        (b"content-type", b"text/plain"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, min_size=2),
    st.sampled_from([None, 2]),
    st.sampled_from(["", "\n", "\ufeff"]),
)
def test_leaves_become_one_object(leaves: dict[str, Any], indent: int | None, padding: str) -> None:
    outputs = {
        name: Output(200, b"", f"{padding}{json.dumps(value, indent=indent)}\n".encode())
        for name, value in leaves.items()
    }
    assert json.loads(merge(outputs)) == leaves


@pytest.mark.parametrize(
    "body", [b"plain", b"", b"\xff\xfe", "{}".encode("utf-16"), b"[" * 100_000, b'{"a": 1} {']
)
def test_the_error_names_a_leaf_whose_output_is_not_json(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^b$"):
        merge({"a": Output(200, b"", b"{}"), "b": Output(200, b"", body)})
