"""Decides which nodes can start, and their inputs: pure functions of the graph and the finished
nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from tsx_runtime.core.shadowing.response_body import load_interruptibly
from tsx_runtime.wire import COPIED, TENSORS_HEAD, Body, Parts

_FRAMING = (
    b"content-type",
    b"content-length",
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    TENSORS_HEAD,
)


class Output(NamedTuple):
    """What a node answered; `headers` is a header block as in `wire`."""

    status: int
    headers: bytes
    body: bytes


class Input(NamedTuple):
    """The input of a node: a body, and its type where it is a form."""

    body: Body
    content_type: bytes | None


def startable(
    parents: Mapping[str, Collection[str]], done: Collection[str], begun: Collection[str]
) -> list[str]:
    """The nodes that have not begun and whose parents are all done, in the graph's order."""
    return [
        node
        for node, above in parents.items()
        if node not in begun and all(parent in done for parent in above)
    ]


def places_of(edges: Mapping[str, Collection[str]]) -> dict[str, bytes]:
    """Tell where each node stands that another one gives rows to, or takes rows from."""
    following = {node for successors in edges.values() for node in successors}
    places = {
        node: b"inner" if node in following else b"first"
        for node, successors in edges.items()
        if successors
    }
    return dict.fromkeys(following, b"last") | places


def needed(
    edges: Mapping[str, Collection[str]], done: Collection[str], begun: Collection[str]
) -> set[str]:
    """Of the nodes that are done, those whose output is still of use: leaves, and those that a node
    takes which has not begun.
    """
    return {
        node
        for node in done
        if not edges[node] or any(successor not in begun for successor in edges[node])
    }


def join(bodies: Mapping[str, bytes], boundary: bytes) -> Input:
    """The output of a node's parents: of one its bytes as they are, of several a form with a field
    for each, by its name.

    `boundary` must not be known to the clients that made the bodies.
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
    return Input(b"".join(pieces) if size <= COPIED else Parts([*pieces], size), form)


def headers_for(
    given: list[tuple[bytes, bytes]], content_type: bytes | None
) -> list[tuple[bytes, bytes]]:
    """The client's headers, for a node that does not get the client's body: without what describes
    that.
    """
    kept = [pair for pair in given if pair[0].lower() not in _FRAMING]
    return kept if content_type is None else [*kept, (b"content-type", content_type)]


def merge(outputs: Mapping[str, Output]) -> bytes:
    """Several leaves as one JSON object, by node.

    Raises ValueError with the name of a leaf whose output is not JSON.

    What is JSON is put in as it is written: numbers keep their digits, and nothing is re-encoded.
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
