"""A request through a graph of nodes that are played here: the order, retries, time-outs, and that
nothing is left behind.
"""

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
from tsx_archiver.workflow import WorkflowSpec, complete, parse_spec
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
from tsx_runtime.wire import Parts, parse_request_meta
from tsx_runtime.worker.codecs.requests import read_row
from tsx_runtime.workflows.execution import run
from tsx_runtime.workflows.node import RunningNode, WorkflowRequest
from tsx_runtime.workflows.schedule import Output

Act = Callable[[WaitingJob], None]


class Played:
    """What a node asks of a model's version, and no more."""

    max_response_size = 1000

    def __init__(self, act: Act) -> None:
        self.act = act
        self.jobs: list[WaitingJob] = []
        self.left: list[WaitingJob] = []

    def submit(self, job: WaitingJob) -> None:
        self.jobs.append(job)
        self.act(job)

    def leave(self, job: WaitingJob) -> None:
        job.gone = True
        self.left.append(job)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row_of(job) for job in self.jobs]


def row_of(job: WaitingJob) -> dict[str, Any]:
    body = b"".join(map(bytes, job.body.pieces)) if isinstance(job.body, Parts) else bytes(job.body)
    row, _ = read_row(job.meta.decode("latin-1"), bytearray(body), True)
    return {
        name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()
    }


def says(text: bytes, status: int = 200, headers: bytes = b"") -> Act:
    return lambda job: job.answer(status, headers, text, BATCH)


def never(job: WaitingJob) -> None:
    """No answer comes."""


def refuses(error: TsxError) -> Act:
    return lambda job: job.refuse(error)


def in_turn(*acts: Act) -> Act:
    """Each attempt gets the next of these."""
    left = iter(acts)
    return lambda job: next(left)(job)


def spec_of(edges: dict[str, list[str]]) -> WorkflowSpec:
    return parse_spec({"models": {}, "dag": edges}, source="spec.yaml", has_handler=True)


def nodes_of(
    played: dict[str, Played], retries: int = 0, timeout: float = 60.0
) -> dict[str, RunningNode]:
    return {
        name: RunningNode(name, cast("ModelVersion", version), retries, timeout)
        for name, version in played.items()
    }


def play(
    edges: dict[str, list[str]],
    acts: dict[str, Act],
    *,
    retries: int = 0,
    timeout: float = 60.0,
    request: WorkflowRequest | None = None,
) -> tuple[Output, dict[str, Played]]:
    """The outcome of one request; raises what it does."""
    played = {name: Played(act) for name, act in acts.items()}

    async def main() -> Output:
        return await run(
            spec_of(edges),
            nodes_of(played, retries, timeout),
            request or WorkflowRequest("id", [(b"x-mine", b"1")], b"body"),
        )

    return asyncio.run(main()), played


def refused(edges: dict[str, list[str]], acts: dict[str, Act], **how: Any) -> TsxError:
    with pytest.raises(TsxError) as caught:
        play(edges, acts, **how)
    return caught.value


def test_a_chain_hands_on_what_each_node_gave() -> None:
    output, played = play(
        {"a": ["b"], "b": ["c"]}, {"a": says(b"1"), "b": says(b"2"), "c": says(b"3")}
    )
    assert output == Output(200, b"content-type: application/json\r\n", b"3")
    assert [played[name].rows for name in "abc"] == [
        [{"body": b"body"}],
        [{"body": b"1"}],
        [{"body": b"2"}],
    ]
    assert {parse_request_meta(job.meta)[0] for node in played.values() for job in node.jobs} == {
        "id"
    }
    assert all(b"x-mine: 1\r\n" in job.meta for node in played.values() for job in node.jobs)


def test_nodes_side_by_side_run_at_once_and_meet_by_their_names() -> None:
    waiting: list[WaitingJob] = []

    def both(job: WaitingJob) -> None:
        """Answers only once the other one is there as well."""
        waiting.append(job)
        if len(waiting) == 2:
            for number, one in enumerate(waiting):
                one.answer(200, b"", b"%d" % number, BATCH)

    _, played = play(
        {"a": ["b", "c"], "b": ["d"], "c": ["d"]},
        {"a": says(b"0"), "b": both, "c": both, "d": says(b"{}")},
    )
    assert played["d"].rows == [{"b": b"0", "c": b"1"}]
    assert [len(node.jobs) for node in played.values()] == [1, 1, 1, 1]


def test_the_leafs_own_status_and_headers_are_the_answers() -> None:
    output, _ = play({"a": []}, {"a": says(b"x", 201, b"Content-Type: text/csv\r\nx-own: 1\r\n")})
    assert output == Output(201, b"Content-Type: text/csv\r\nx-own: 1\r\n", b"x")


def test_several_leaves_are_one_object_and_one_that_is_no_json_is_named() -> None:
    output, _ = play(
        {"a": ["b", "c"]}, {"a": says(b"0"), "b": says(b'{"x": 1}'), "c": says(b"[2]")}
    )
    assert json.loads(output.body) == {"b": {"x": 1}, "c": [2]}
    error = refused({"a": ["b", "c"]}, {"a": says(b"0"), "b": says(b"{}"), "c": says(b"text")})
    assert (error.status, error.message[:40]) == (500, "Error executing c: its output is not JSO")


def test_a_node_that_fails_is_asked_again_as_often_as_it_may() -> None:
    failed = says(error_body(503, "InternalServerException", "Prediction failed"), 503)
    output, played = play(
        {"a": []},
        {"a": in_turn(failed, refuses(WorkerDied("Worker died.")), says(b"ok"))},
        retries=2,
    )
    assert output.body == b"ok"
    assert len(played["a"].jobs) == 3
    error = refused({"a": []}, {"a": failed}, retries=2)
    assert (error.status, error.type) == (500, "InternalServerException")
    assert error.message == "Error executing a: Prediction failed (attempts: 3)"


def test_a_node_that_fails_ends_the_others_and_none_begins_after_it() -> None:
    played = {
        name: Played(act)
        for name, act in {
            "a": says(b"0"),
            "b": never,
            "c": refuses(WorkerDied("Died.")),
            "d": never,
        }.items()
    }

    async def main() -> None:
        with pytest.raises(NodeFailed, match="Error executing c: Died"):
            await run(
                spec_of({"a": ["b", "c"], "b": ["d"], "c": ["d"]}),
                nodes_of(played),
                WorkflowRequest("id", [], b""),
            )
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert played["b"].left == played["b"].jobs
    assert played["d"].jobs == []


@pytest.mark.parametrize(
    ("act", "kind", "status", "tries"),
    [
        (refuses(QueueFull("Full.", retry_after=7)), QueueFull, 503, 1),
        (refuses(QueueFull("Full.", retry_after=7, status=429)), QueueFull, 429, 1),
        (refuses(OutOfResources("Out of resources")), OutOfResources, 507, 3),
        (
            says(error_body(507, "InternalServerException", "Out of resources"), 507),
            OutOfResources,
            507,
            3,
        ),
        (says(b"own words", 422), NodeFailed, 422, 1),
        (says(b"\xff" * 5000, 555), NodeFailed, 555, 3),
        (says(b'{"code": "x"}', 503), NodeFailed, 500, 3),
        (refuses(TsxError("odd")), NodeFailed, 500, 3),
    ],
)
def test_what_is_wrong_with_a_node_is_reported_by_status_and_tried_again_where_that_can_help(
    act: Act, kind: type[TsxError], status: int, tries: int
) -> None:
    asked: list[WaitingJob] = []

    def counted(job: WaitingJob) -> None:
        asked.append(job)
        act(job)

    error = refused({"a": []}, {"a": counted}, retries=2)
    assert (type(error), error.status, len(asked)) == (kind, status, tries)
    assert error.message.startswith("Error executing a: ")
    assert len(error.message) < 1200
    assert getattr(error, "retry_after", 7) == 7


def test_an_attempt_that_takes_too_long_is_given_up_and_leaves_its_place() -> None:
    played = {"a": Played(in_turn(never, says(b"ok")))}

    async def main() -> Output:
        return await run(
            spec_of({"a": []}),
            nodes_of(played, retries=1, timeout=0.01),
            WorkflowRequest("id", [], b""),
        )

    assert asyncio.run(main()).body == b"ok"
    assert played["a"].left == played["a"].jobs[:1]
    assert [job.deadline for job in played["a"].jobs] == [None, None], (
        "it may wait for its turn as long as it has"
    )
    error = refused({"a": []}, {"a": never}, timeout=0.01)
    assert error.message == "Error executing a: it did not answer within 10 ms (timeout-ms)"
    assert error.status == 500


def test_the_clients_time_bounds_every_node_and_is_not_spent_twice() -> None:
    end = time.monotonic() + 0.05
    error = refused(
        {"a": []}, {"a": never}, retries=5, request=WorkflowRequest("id", [], b"", deadline=end)
    )
    assert isinstance(error, DeadlinePassed)
    assert error.message == "Error executing a: the deadline of the request has passed"
    _, played = play(
        {"a": []},
        {"a": says(b"1")},
        request=WorkflowRequest("id", [], b"", deadline=end + 60, priority=7),
    )
    (job,) = played["a"].jobs
    assert (job.deadline, job.priority) == (end + 60, 7)
    late = refused(
        {"a": []},
        {"a": says(b"1")},
        request=WorkflowRequest("id", [], b"", deadline=time.monotonic() - 1),
    )
    assert isinstance(late, DeadlinePassed)


def test_a_request_that_is_given_up_leaves_every_queue_it_waits_in() -> None:
    played: dict[str, Played] = {}

    async def main() -> None:
        asked = asyncio.Event()
        played.update(a=Played(never), b=Played(lambda job: asked.set()))
        running = asyncio.create_task(
            run(spec_of({"a": [], "b": []}), nodes_of(played), WorkflowRequest("id", [], b""))
        )
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert all(node.left == node.jobs != [] for node in played.values())


class Streaming:
    """The worker's side of a streamed answer."""

    def hold(self, job: object) -> None: ...

    def release(self, job: object) -> None: ...


def test_a_streamed_output_is_taken_whole_and_one_that_breaks_off_is_a_failure() -> None:
    def stream(job: WaitingJob) -> None:
        job.piece(b"", b"a", Streaming())
        job.piece(b"", b"b", Streaming())
        job.answer(200, b"", b"c", BATCH)

    def breaks(job: WaitingJob) -> None:
        job.piece(b"", b"a", Streaming())
        job.refuse(WorkerDied("Worker died."))

    output, _ = play({"a": []}, {"a": in_turn(breaks, stream)}, retries=1)
    assert output.body == b"abc"


@given(
    acyclic(7),
    st.randoms(use_true_random=False),
    st.sets(st.sampled_from([f"n{number}" for number in range(7)]), max_size=1),
)
def test_any_graph_is_answered_once_whatever_comes_first_or_fails(
    edges: dict[str, list[str]], random: Any, failing: set[str]
) -> None:
    """Each node answers with what it got; what comes out of the leaves is what the graph says, or
    the failing node is named.
    """
    whole = complete(edges)

    async def main() -> None:
        waiting: list[tuple[str, WaitingJob]] = []
        played = {
            name: Played(lambda job, name=name: waiting.append((name, job))) for name in whole
        }  # type: ignore[misc]  # a default argument
        running = asyncio.create_task(
            run(spec_of(edges), nodes_of(played), WorkflowRequest("id", [], b"start"))
        )
        while not running.done():
            if not waiting:
                await asyncio.sleep(0)
                continue
            name, job = waiting.pop(random.randrange(len(waiting)))
            if name in failing:
                job.refuse(WorkerDied("Died."))
            else:
                row = {
                    key: json.loads(value) if value != b"start" else "start"
                    for key, value in row_of(job).items()
                }
                job.answer(200, b"", json.dumps({name: row}).encode(), BATCH)
            await asyncio.sleep(0)
        if failing & set(whole):
            with pytest.raises(NodeFailed, match=rf"Error executing {next(iter(failing))}: Died"):
                await running
        else:
            leaves = [name for name, following in whole.items() if not following]
            expected = {leaf: {leaf: expected_row(whole, leaf)} for leaf in leaves}
            found = json.loads((await running).body)
            assert found == (expected if len(leaves) > 1 else expected[leaves[0]])
            assert [len(node.jobs) for node in played.values()] == [1] * len(whole)

    asyncio.run(main())


def expected_row(edges: dict[str, tuple[str, ...]], node: str) -> dict[str, Any]:
    parents = [name for name, following in edges.items() if node in following]
    given = {parent: {parent: expected_row(edges, parent)} for parent in parents}
    return (
        {"body": "start"}
        if not given
        else {"body": given[parents[0]]}
        if len(given) == 1
        else given
    )


@pytest.mark.parametrize(
    ("parts", "timeout", "why"),
    [(11, 60.0, "more than 1000 bytes together"), (1, 0.05, "timeout-ms")],
)
def test_a_node_whose_stream_is_too_long_or_too_slow_is_reported_to_stop(
    parts: int, timeout: float, why: str
) -> None:
    def act(job: WaitingJob) -> None:
        for _ in range(parts):
            job.piece(b"", b"x" * 100, Streaming())

    node = Played(act)
    with pytest.raises(NodeFailed, match=why):
        asyncio.run(
            run(
                spec_of({"a": []}),
                nodes_of({"a": node}, timeout=timeout),
                WorkflowRequest("id", [], b""),
            )
        )
    assert node.left == node.jobs


def test_a_node_that_gets_no_tensors_is_not_reported_that_it_does() -> None:
    request = WorkflowRequest(
        "id", [(b"Inference-Header-Content-Length", b"2"), (b"x-mine", b"1")], b"{}"
    )
    _, played = play({"a": ["b"]}, {"a": says(b"1"), "b": says(b"2")}, request=request)
    first, second = (node.jobs[0].meta.lower() for node in played.values())
    assert b"inference-header-content-length: 2" in first
    assert b"inference-header" not in second
    assert b"x-mine: 1" in second
