"""The execution of a request in a workflow.

Each node starts when its inputs are ready. The execution ends when the leaves are done or a node
fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping

from tsx_archiver.workflow import WorkflowSpec
from tsx_runtime.errors import NodeFailed
from tsx_runtime.features.workflows.node import RunningNode, WorkflowRequest, ask_node
from tsx_runtime.features.workflows.schedule import (
    Output,
    headers_for,
    join,
    merge,
    needed_nodes,
    startable_nodes,
)
from tsx_runtime.wire import JSON_HEADER, MAX_COPIED_BYTES, Body


async def run(
    spec: WorkflowSpec, nodes: Mapping[str, RunningNode], request: WorkflowRequest
) -> Output:
    """Return the output of the only leaf unchanged, or the outputs of all leaves as a JSON object.

    The first node that fails ends the request with the errors of `ask_node`. The other nodes are
    then cancelled. They are also cancelled when this call is cancelled.
    """
    outputs: dict[str, Output] = {}  # outputs that are still needed
    finished: set[str] = set()
    started: set[str] = set()
    tasks: dict[asyncio.Task[Output], str] = {}
    try:
        while len(finished) < len(nodes):
            for name in startable_nodes(spec.parents, finished, started):
                headers, body = _input(spec.parents[name], outputs, request)
                tasks[asyncio.create_task(ask_node(nodes[name], headers, body, request))] = name
                started.add(name)
                del body  # This lets the node free the body before this loop ends.
            needed_names = needed_nodes(spec.edges, outputs, started)
            outputs = {name: output for name, output in outputs.items() if name in needed_names}
            finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished_tasks:
                name = tasks[task]
                outputs[name] = task.result()
                del tasks[task]
                finished.add(name)
    finally:
        await _cancel_all(tasks)
    leaf_outputs = {leaf: outputs[leaf] for leaf in spec.leaves}
    is_large = (
        len(leaf_outputs) > 1
        and sum(len(output.body) for output in leaf_outputs.values()) > MAX_COPIED_BYTES
    )
    return (
        await asyncio.to_thread(_merge_leaves, leaf_outputs)
        if is_large
        else _merge_leaves(leaf_outputs)
    )


def _input(
    parents: Iterable[str], outputs: Mapping[str, Output], request: WorkflowRequest
) -> tuple[list[tuple[bytes, bytes]], Body]:
    bodies = {parent: outputs[parent].body for parent in parents}
    if not bodies:
        return request.headers, request.body
    node_input = join(bodies, secrets.token_hex(16).encode() if len(bodies) > 1 else b"")
    return headers_for(request.headers, node_input.content_type), node_input.body


async def _cancel_all(tasks: Iterable[asyncio.Task[Output]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _merge_leaves(leaves: Mapping[str, Output]) -> Output:
    if len(leaves) > 1:
        try:
            return Output(200, JSON_HEADER, merge(leaves))
        except ValueError as error:
            raise NodeFailed(
                f"Error executing {error}: its output is not JSON. A workflow with several leaves"
                " answers with one JSON object, so each leaf must give JSON; add a node that takes"
                " them all, or let this one return a dict."
            ) from error
    ((_, output),) = leaves.items()
    has_content_type = any(
        line.lower().startswith(b"content-type:") for line in output.headers.split(b"\r\n")
    )
    return output if has_content_type else output._replace(headers=output.headers + JSON_HEADER)
