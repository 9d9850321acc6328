"""Micro-batches, which pass through the stages in parallel and keep the order of the batch."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.worker.conftest import Request, StartWorker
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.execution.micro_batching import MicroBatching
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics


class Handler:
    """A handler that runs in micro-batches and records their sizes; some rows make it fail."""

    def __init__(self, size: int, **parallelism: int) -> None:
        self.handle: Any = MicroBatching(self, size, parallelism)
        self.sizes: list[int] = []
        self.barrier = threading.Barrier(2, timeout=20)
        self.context: Any = None

    def preprocess(self, rows: list[Any]) -> list[Any]:
        self.sizes.append(len(rows))
        if "bad" in rows:
            raise BadRows({rows.index("bad"): "is bad"})
        if "meet" in rows:
            self.barrier.wait()
        first_index = self.handle.get_micro_batch_idx() * self.handle.micro_batch_size
        for idx, row in enumerate(rows):
            assert self.context.get_request_id(first_index + idx) == self.context.get_request_id(
                idx
            )
            self.context.set_response_header(
                idx, "x-row", f"{row} {self.context.get_request_id(idx)}"
            )
        return rows

    def inference(self, rows: list[Any]) -> list[Any]:
        if "lost" in rows:
            raise RuntimeError("lost")
        return rows

    def postprocess(self, rows: list[Any]) -> Any:
        if "few" in rows:
            return rows[1:]
        return "text" if "text" in rows else [f"{row}!" for row in rows]


def make_context(count: int) -> Context:
    context = Context("m", ".", {}, count, None, "0", True, Metrics("m"), {})
    context.begin([request_meta(f"id-{idx}", b"", ()).decode() for idx in range(count)])
    return context


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_results_keep_request_order_and_micro_batches_respect_the_size(
    count: int, size: int, readers: int, writers: int
) -> None:
    handler = Handler(size, preprocess=readers, postprocess=writers)
    context = make_context(count)
    rows = [f"row {idx}" for idx in range(count)]
    assert handler.handle(rows, context) == [f"{row}!" for row in rows]
    assert sum(handler.sizes) == count
    assert all(micro_batch_size <= size for micro_batch_size in handler.sizes)
    assert [context.get_response_headers(idx)["x-row"] for idx in range(count)] == [
        f"row {idx} id-{idx}" for idx in range(count)
    ]
    handler.handle.shutdown()


def test_a_stage_runs_one_micro_batch_per_thread() -> None:
    handler = Handler(1, preprocess=2)
    assert handler.handle(["meet", "meet"], make_context(2)) == ["meet!", "meet!"]
    handler.handle.parallelism = {"preprocess": 1}
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 1, "postprocess": 1}
    handler.handle.micro_batch_size = 2
    assert handler.handle(["a", "b"], make_context(2)) == ["a!", "b!"]
    assert handler.handle.micro_batch_size == 2


@pytest.mark.parametrize(
    ("row", "error_type"), [("lost", RuntimeError), ("few", ValueError), ("text", TypeError)]
)
def test_a_failing_micro_batch_fails_the_batch_once_all_have_finished(
    row: str, error_type: type
) -> None:
    handler = Handler(1)
    with pytest.raises(error_type):
        handler.handle([row, "a", "b"], make_context(3))
    assert handler.sizes == [1, 1, 1]
    assert handler.handle(["a"], make_context(1)) == ["a!"]


def test_indexes_of_bad_rows_refer_to_the_whole_batch() -> None:
    with pytest.raises(BadRows) as raised:
        Handler(2).handle(["a", "b", "c", "bad"], make_context(4))
    assert raised.value.faults == {3: "is bad"}


@pytest.mark.parametrize(
    ("size", "parallelism", "reason"),
    [
        (0, None, "micro_batch_size is 0"),
        ("4", None, "'4'"),
        (1, {"infer": 2}, "no stage 'infer'"),
        (1, {"inference": 0}, "inference is 0"),
    ],
)
def test_an_invalid_size_or_stage_is_refused_at_once(
    size: Any, parallelism: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        MicroBatching(object(), size, parallelism)


HANDLER = """
    import threading
    from ts.handler_utils.micro_batching import MicroBatching
    from ts.torch_handler.base_handler import BaseHandler

    class Handler(BaseHandler):
        def __init__(self):
            super().__init__()
            {statement}

        def initialize(self, context):
            self.context = context

        def preprocess(self, rows):
            return [(bytes(row["body"]).decode(), len(rows), threading.current_thread().name) for row in rows]

        def inference(self, rows):
            return rows

        def postprocess(self, rows):
            return [list(row) for row in rows]
"""


@pytest.mark.parametrize(
    ("statement", "config"),
    [
        ("self.handle = MicroBatching(self, 2)", {}),
        ("", {"micro_batching": {"micro_batch_size": 2}}),
    ],
)
def test_micro_batches_are_set_in_the_handler_or_the_configuration(
    start_worker: StartWorker, statement: str, config: Any
) -> None:
    worker = start_worker(HANDLER.format(statement=statement), model_config=config)
    results = [json.loads(body) for body in worker.ask_bodies(b"a", b"b", b"c")]
    assert [(letter, size) for letter, size, _ in results] == [("a", 2), ("b", 2), ("c", 1)]
    assert all(thread.startswith("tsx-preprocess") for _, _, thread in results)
    assert worker.ask_statuses(Request(headers=[(b"describe", b"True")])) == [200]


def test_a_typo_in_the_configuration_is_reported_when_the_model_loads(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        HANDLER.format(statement=""),
        model_config={"micro_batching": {"parallelism": {"inferense": 2}}},
    )
    assert not worker.loaded
    assert "parallelism has no stage 'inferense'" in worker.report["message"]
