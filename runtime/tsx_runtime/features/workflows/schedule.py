"""The order of a workflow's nodes, and their inputs.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from tsx_runtime.core.comparison.response_body import load_interruptibly
from tsx_runtime.wire import MAX_COPIED_BYTES, TENSORS_HEAD, Body, Parts

_BODY_HEADERS = (
    b"content-type",
    b"content-length",
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    TENSORS_HEAD,
)


class Output(NamedTuple):
    """The output of a node; `headers` is a header block of `wire`."""

    status: int
    headers: bytes
    body: bytes


class Input(NamedTuple):
    """The input of a node: a body, with its content type if it is a form."""

    body: Body
    content_type: bytes | None


def startable_nodes(
    parents: Mapping[str, Collection[str]], finished: Collection[str], started: Collection[str]
) -> list[str]:
    """Return the nodes that have not started and whose parents are done, in the graph's order."""
    return [
        node
        for node, node_parents in parents.items()
        if node not in started and all(parent in finished for parent in node_parents)
    ]


def row_positions(edges: Mapping[str, Collection[str]]) -> dict[str, bytes]:
    """Return the position (first, inner or last) of each node with a parent or a successor."""
    successor_nodes = {node for successors in edges.values() for node in successors}
    positions = {
        node: b"inner" if node in successor_nodes else b"first"
        for node, successors in edges.items()
        if successors
    }
    return dict.fromkeys(successor_nodes, b"last") | positions


def needed_nodes(
    edges: Mapping[str, Collection[str]], finished: Collection[str], started: Collection[str]
) -> set[str]:
    """Return the finished nodes whose outputs are still needed.

    These are the leaves, and the parents of nodes that have not started.
    """
    return {
        node
        for node in finished
        if not edges[node] or any(successor not in started for successor in edges[node])
    }


def join(bodies: Mapping[str, bytes], boundary: bytes) -> Input:
    """Return the output of one parent unchanged, or the outputs of several as fields of a form.

    `boundary` must be secret, so that no client can put it into a body.
    """
    if len(bodies) == 1:
        return Input(next(iter(bodies.values())), None)
    pieces: list[bytes] = []
    for name, body in bodies.items():
        pieces += (
            b'--%b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'
            % (boundary, name.encode()),
            body,
            b"\r\n",
        )
    pieces.append(b"--%b--\r\n" % boundary)
    size = sum(map(len, pieces))
    form = b"multipart/form-data; boundary=" + boundary
    return Input(b"".join(pieces) if size <= MAX_COPIED_BYTES else Parts([*pieces], size), form)


def headers_for(
    client_headers: list[tuple[bytes, bytes]], content_type: bytes | None
) -> list[tuple[bytes, bytes]]:
    """Return the client's headers without those that describe the client's body."""
    headers = [pair for pair in client_headers if pair[0].lower() not in _BODY_HEADERS]
    return headers if content_type is None else [*headers, (b"content-type", content_type)]


def merge(outputs: Mapping[str, Output]) -> bytes:
    """Return the outputs of several leaves as one JSON object, by node.

    The text of each output is copied, so that numbers keep their digits.

    Raises:
        ValueError: The output of a leaf is not JSON; the message is the leaf's name.
    """
    members = []
    for name, output in outputs.items():
        try:
            text = str(output.body, "utf-8-sig").strip()
            load_interruptibly(text)
        except (ValueError, RecursionError):
            raise ValueError(name) from None
        members.append(f'  "{name}": {text}')
    return ("{\n" + ",\n".join(members) + "\n}\n").encode()
