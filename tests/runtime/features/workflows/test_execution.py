"""A request through a graph of fake nodes: order, retries, timeouts, and released resources."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import BATCH
from tests.support.graphs import acyclic
from tsx_archiver.workflow import normalized_edges, parse_spec
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import (
    DeadlinePassed,
    NodeFailed,
    OutOfResources,
    QueueFull,
    TsxError,
    WorkerDied,
    error_body,
)
from tsx_runtime.features.workflows.execution import run
from tsx_runtime.features.workflows.node import RunningNode, WorkflowRequest
from tsx_runtime.features.workflows.schedule import Output
from tsx_runtime.wire import Parts, parse_request_meta
from tsx_runtime.worker.codecs.requests import read_row

Act = Callable[[WaitingJob], None]
DIAMOND = {"a": ["b", "c"], "b": ["d"], "c": ["d"]}
REQUEST = WorkflowRequest("id", [(b"x-mine", b"1")], b"body")


class FakeVersion:
    """The part of a model version that a node uses; a function answers its jobs."""

    max_response_size = 1000

    def __init__(self, act: Act) -> None:
        self.act = act
        self.jobs: list[WaitingJob] = []
        self.left_jobs: list[WaitingJob] = []

    def submit(self, job: WaitingJob) -> None:
        self.jobs.append(job)
        self.act(job)

    def leave(self, job: WaitingJob) -> None:
        job.gone = True
        self.left_jobs.append(job)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row_of(job) for job in self.jobs]


def row_of(job: WaitingJob) -> dict[str, Any]:
    body = b"".join(map(bytes, job.body.pieces)) if isinstance(job.body, Parts) else bytes(job.body)
    row, _ = read_row(job.meta.decode("latin-1"), bytearray(body), True)
    return {
        name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()
    }


def answers(body: bytes, status: int = 200, headers: bytes = b"") -> Act:
    return lambda job: job.answer(status, headers, body, BATCH)


def keep_waiting(job: WaitingJob) -> None:
    """Give no answer."""


def refuses(error: TsxError) -> Act:
    return lambda job: job.refuse(error)


def in_turn(*acts: Act) -> Act:
    """Handle each attempt with the next of these functions."""
    remaining_acts = iter(acts)
    return lambda job: next(remaining_acts)(job)


class Flow:
    """A graph with one function per node that answers the node's jobs."""

    def __init__(
        self, edges: dict[str, list[str]], retries: int = 0, timeout: float = 60.0, **acts: Act
    ) -> None:
        self.spec = parse_spec({"models": {}, "dag": edges}, source="spec.yaml", has_handler=True)
        self.versions = {name: FakeVersion(act) for name, act in acts.items()}
        self.nodes = {
            name: RunningNode(name, cast("ModelVersion", version), retries, timeout)
            for name, version in self.versions.items()
        }

    async def start(self, request: WorkflowRequest = REQUEST) -> Output:
        return await run(self.spec, self.nodes, request)

    def run(self, request: WorkflowRequest = REQUEST) -> Output:
        return asyncio.run(self.start(request))

    def failure(self, request: WorkflowRequest = REQUEST) -> TsxError:
        with pytest.raises(TsxError) as exc_info:
            self.run(request)
        return exc_info.value


def test_a_chain_passes_each_output_to_the_next_node() -> None:
    flow = Flow({"a": ["b"], "b": ["c"]}, a=answers(b"1"), b=answers(b"2"), c=answers(b"3"))
    assert flow.run() == Output(200, b"content-type: application/json\r\n", b"3")
    rows = [version.rows for version in flow.versions.values()]
    assert rows == [[{"body": b"body"}], [{"body": b"1"}], [{"body": b"2"}]]
    jobs = [job for version in flow.versions.values() for job in version.jobs]
    assert {parse_request_meta(job.meta)[0] for job in jobs} == {"id"}
    assert all(b"x-mine: 1\r\n" in job.meta for job in jobs)


def test_parallel_nodes_run_concurrently_and_are_joined_by_name() -> None:
    waiting_jobs: list[WaitingJob] = []

    def meet(job: WaitingJob) -> None:
        """Answer both jobs once the second one is there."""
        waiting_jobs.append(job)
        if len(waiting_jobs) == 2:
            for number, waiting_job in enumerate(waiting_jobs):
                waiting_job.answer(200, b"", b"%d" % number, BATCH)

    flow = Flow(DIAMOND, a=answers(b"0"), b=meet, c=meet, d=answers(b"{}"))
    flow.run()
    assert flow.versions["d"].rows == [{"b": b"0", "c": b"1"}]
    assert [len(version.jobs) for version in flow.versions.values()] == [1, 1, 1, 1]


def test_the_answer_has_the_leafs_status_and_headers() -> None:
    headers = b"Content-Type: text/csv\r\nx-own: 1\r\n"
    assert Flow({"a": []}, a=answers(b"x", 201, headers)).run() == Output(201, headers, b"x")


def test_several_leaves_are_one_object_and_must_be_json() -> None:
    leaves = {"a": ["b", "c"]}
    output = Flow(leaves, a=answers(b"0"), b=answers(b'{"x": 1}'), c=answers(b"[2]")).run()
    assert json.loads(output.body) == {"b": {"x": 1}, "c": [2]}
    error = Flow(leaves, a=answers(b"0"), b=answers(b"{}"), c=answers(b"text")).failure()
    assert error.status == 500
    assert error.message.startswith("Error executing c: its output is not JSON")


def test_a_failing_node_is_retried_up_to_its_limit() -> None:
    failure = answers(error_body(503, "InternalServerException", "Prediction failed"), 503)
    acts = in_turn(failure, refuses(WorkerDied("Worker died.")), answers(b"ok"))
    flow = Flow({"a": []}, retries=2, a=acts)
    assert flow.run().body == b"ok"
    assert len(flow.versions["a"].jobs) == 3
    error = Flow({"a": []}, retries=2, a=failure).failure()
    assert (error.status, error.type) == (500, "InternalServerException")
    assert error.message == "Error executing a: Prediction failed (attempts: 3)"


def test_a_failing_node_cancels_the_others_and_starts_no_more() -> None:
    worker_died = refuses(WorkerDied("Died."))
    flow = Flow(DIAMOND, a=answers(b"0"), b=keep_waiting, c=worker_died, d=keep_waiting)

    async def main() -> None:
        with pytest.raises(NodeFailed, match="Error executing c: Died"):
            await flow.start()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert flow.versions["b"].left_jobs == flow.versions["b"].jobs
    assert flow.versions["d"].jobs == []


@pytest.mark.parametrize(
    ("act", "kind", "status", "attempts"),
    [
        (refuses(QueueFull("Full.", retry_after=7)), QueueFull, 503, 1),
        (refuses(QueueFull("Full.", retry_after=7, status=429)), QueueFull, 429, 1),
        (refuses(OutOfResources("Out of resources")), OutOfResources, 507, 3),
        (
            answers(error_body(507, "InternalServerException", "Out of resources"), 507),
            OutOfResources,
            507,
            3,
        ),
        (answers(b"own words", 422), NodeFailed, 422, 1),
        (answers(b"\xff" * 5000, 555), NodeFailed, 555, 3),
        (answers(b'{"code": "x"}', 503), NodeFailed, 500, 3),
        (refuses(TsxError("odd")), NodeFailed, 500, 3),
    ],
)
def test_node_failures_have_a_status_and_are_retried_if_useful(
    act: Act, kind: type[TsxError], status: int, attempts: int
) -> None:
    flow = Flow({"a": []}, retries=2, a=act)
    error = flow.failure()
    assert (type(error), error.status) == (kind, status)
    assert len(flow.versions["a"].jobs) == attempts
    assert error.message.startswith("Error executing a: ")
    assert len(error.message) < 1200
    assert getattr(error, "retry_after", 7) == 7


def test_a_timed_out_attempt_is_abandoned_and_frees_its_place() -> None:
    flow = Flow({"a": []}, retries=1, timeout=0.01, a=in_turn(keep_waiting, answers(b"ok")))
    assert flow.run().body == b"ok"
    version = flow.versions["a"]
    assert version.left_jobs == version.jobs[:1]
    # A queued job has no deadline of its own.
    assert [job.deadline for job in version.jobs] == [None, None]
    error = Flow({"a": []}, timeout=0.01, a=keep_waiting).failure()
    assert error.message == "Error executing a: it did not answer within 10 ms (timeout-ms)"
    assert error.status == 500


def test_the_clients_deadline_applies_to_every_node() -> None:
    end = time.monotonic() + 0.05
    request = WorkflowRequest("id", [], b"", deadline=end)
    error = Flow({"a": []}, retries=5, a=keep_waiting).failure(request)
    assert isinstance(error, DeadlinePassed)
    assert error.message == "Error executing a: the deadline of the request has passed"
    flow = Flow({"a": []}, a=answers(b"1"))
    flow.run(WorkflowRequest("id", [], b"", deadline=end + 60, priority=7))
    (job,) = flow.versions["a"].jobs
    assert (job.deadline, job.priority) == (end + 60, 7)
    assert isinstance(Flow({"a": []}, a=answers(b"1")).failure(request), DeadlinePassed)


def test_a_cancelled_request_leaves_every_queue() -> None:
    async def main() -> Flow:
        submitted = asyncio.Event()
        flow = Flow({"a": [], "b": []}, a=keep_waiting, b=lambda job: submitted.set())
        run_task = asyncio.create_task(flow.start())
        await submitted.wait()
        run_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_task
        assert len(asyncio.all_tasks()) == 1
        return flow

    versions = asyncio.run(main()).versions.values()
    assert all(version.left_jobs == version.jobs != [] for version in versions)


class Streaming:
    """The worker's side of a streamed answer."""

    def hold(self, job: object) -> None: ...

    def release(self, job: object) -> None: ...


def test_a_streamed_output_is_joined_and_a_broken_one_fails() -> None:
    def stream(job: WaitingJob) -> None:
        job.piece(b"", b"a", Streaming())
        job.piece(b"", b"b", Streaming())
        job.answer(200, b"", b"c", BATCH)

    def break_off(job: WaitingJob) -> None:
        job.piece(b"", b"a", Streaming())
        job.refuse(WorkerDied("Worker died."))

    assert Flow({"a": []}, retries=1, a=in_turn(break_off, stream)).run().body == b"abc"


@given(
    acyclic(7),
    st.randoms(use_true_random=False),
    st.sets(st.sampled_from([f"n{number}" for number in range(7)]), max_size=1),
)
def test_any_graph_is_answered_once_in_any_completion_order(
    edges: dict[str, list[str]], random: Any, failing_nodes: set[str]
) -> None:
    """Let each node answer with its input, and compare the leaves with the graph.

    If a node fails, the error names it.
    """
    graph = normalized_edges(edges)

    async def main() -> None:
        waiting_jobs: list[tuple[str, WaitingJob]] = []
        acts = {name: (lambda job, name=name: waiting_jobs.append((name, job))) for name in graph}
        flow = Flow(edges, **acts)  # type: ignore[arg-type]  # lambdas with a default
        run_task = asyncio.create_task(flow.start(WorkflowRequest("id", [], b"start")))
        while not run_task.done():
            if not waiting_jobs:
                await asyncio.sleep(0)
                continue
            name, job = waiting_jobs.pop(random.randrange(len(waiting_jobs)))
            if name in failing_nodes:
                job.refuse(WorkerDied("Died."))
            else:
                row = {
                    key: "start" if value == b"start" else json.loads(value)
                    for key, value in row_of(job).items()
                }
                job.answer(200, b"", json.dumps({name: row}).encode(), BATCH)
            await asyncio.sleep(0)
        if failing_nodes & set(graph):
            with pytest.raises(
                NodeFailed, match=rf"Error executing {next(iter(failing_nodes))}: Died"
            ):
                await run_task
        else:
            leaves = [name for name, children in graph.items() if not children]
            outputs = {leaf: {leaf: expected_row(graph, leaf)} for leaf in leaves}
            expected = outputs if len(leaves) > 1 else outputs[leaves[0]]
            assert json.loads((await run_task).body) == expected
            assert all(len(version.jobs) == 1 for version in flow.versions.values())

    asyncio.run(main())


def expected_row(edges: dict[str, tuple[str, ...]], node: str) -> dict[str, Any]:
    """Return the row of a node whose parents answer with theirs."""
    rows = {
        parent: {parent: expected_row(edges, parent)}
        for parent, children in edges.items()
        if node in children
    }
    match list(rows.values()):
        case []:
            return {"body": "start"}
        case [row]:
            return {"body": row}
    return rows


@pytest.mark.parametrize(
    ("parts", "timeout", "reason"),
    [(11, 60.0, "more than 1000 bytes together"), (1, 0.05, "timeout-ms")],
)
def test_a_node_with_a_too_long_or_slow_stream_is_stopped(
    parts: int, timeout: float, reason: str
) -> None:
    def stream(job: WaitingJob) -> None:
        for _ in range(parts):
            job.piece(b"", b"x" * 100, Streaming())

    flow = Flow({"a": []}, timeout=timeout, a=stream)
    error = flow.failure()
    assert isinstance(error, NodeFailed)
    assert reason in error.message
    assert flow.versions["a"].left_jobs == flow.versions["a"].jobs


def test_only_the_first_node_gets_the_header_of_the_clients_tensors() -> None:
    headers = [(b"Inference-Header-Content-Length", b"2"), (b"x-mine", b"1")]
    flow = Flow({"a": ["b"]}, a=answers(b"1"), b=answers(b"2"))
    flow.run(WorkflowRequest("id", headers, b"{}"))
    first, second = (version.jobs[0].meta.lower() for version in flow.versions.values())
    assert b"inference-header-content-length: 2" in first
    assert b"inference-header" not in second
    assert b"x-mine: 1" in second
