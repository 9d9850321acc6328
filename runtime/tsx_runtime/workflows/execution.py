"""The execution of a request in a workflow.

Each node starts when its inputs are ready, until the leaves are done or a node fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping

from tsx_archiver.workflow import WorkflowSpec
from tsx_runtime.errors import NodeFailed
from tsx_runtime.wire import JSON_HEADER, MAX_COPIED_BYTES, Body
from tsx_runtime.workflows.node import RunningNode, WorkflowRequest, ask
from tsx_runtime.workflows.schedule import Output, headers_for, join, merge, needed, startable


async def run(
    spec: WorkflowSpec, nodes: Mapping[str, RunningNode], request: WorkflowRequest
) -> Output:
    """Return the answer of the only leaf unchanged, or those of several leaves as one JSON object.

    The first node that fails ends the request with the errors of `ask`. The other nodes are
    cancelled, as they are when this call is cancelled.
    """
    done: dict[str, Output] = {}  # outputs that a node still needs
    finished: set[str] = set()
    started: set[str] = set()
    tasks: dict[asyncio.Task[Output], str] = {}
    try:
        while len(finished) < len(nodes):
            for name in startable(spec.parents, finished, started):
                headers, body = _input(spec.parents[name], done, request)
                tasks[asyncio.create_task(ask(nodes[name], headers, body, request))] = name
                started.add(name)
                del body  # Only the node holds it now.
            needed_nodes = needed(spec.edges, done, started)
            done = {name: output for name, output in done.items() if name in needed_nodes}
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                name = tasks[task]
                done[name] = task.result()
                del tasks[task]
                finished.add(name)
    finally:
        await _end(tasks)
    outputs = {leaf: done[leaf] for leaf in spec.leaves}
    large = (
        len(outputs) > 1 and sum(len(output.body) for output in outputs.values()) > MAX_COPIED_BYTES
    )
    return await asyncio.to_thread(_answer, outputs) if large else _answer(outputs)


def _input(
    parents: Iterable[str], done: Mapping[str, Output], request: WorkflowRequest
) -> tuple[list[tuple[bytes, bytes]], Body]:
    bodies = {parent: done[parent].body for parent in parents}
    if not bodies:
        return request.headers, request.body
    joined = join(bodies, secrets.token_hex(16).encode() if len(bodies) > 1 else b"")
    return headers_for(request.headers, joined.content_type), joined.body


async def _end(tasks: Iterable[asyncio.Task[Output]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _answer(leaves: Mapping[str, Output]) -> Output:
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
    typed = any(line.lower().startswith(b"content-type:") for line in output.headers.split(b"\r\n"))
    return output if typed else output._replace(headers=output.headers + JSON_HEADER)
