"""Preprocessing of the next batch while the model runs the current one."""

from __future__ import annotations

import inspect
import io
import json

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import Request, StartWorker, Worker
from tsx_runtime.wire import Kind
from tsx_runtime.worker.codecs.requests import owned_bytes
from tsx_runtime.worker.execution.prefetch import copy_items

HANDLER = """
    import os, threading, time, torch
    from ts.torch_handler.base_handler import BaseHandler
    from ts.handler_utils.utils import send_intermediate_predict_response
    from tsx_runtime.worker.exceptions import BadRows

    begun = {name: threading.Event() for name in "ab"}

    class Stages(BaseHandler):
        def initialize(self, context):
            self.context, self.device, self.initialized, self.calls = context, torch.device("cpu"), True, []

        def header(self, name):
            return self.context.get_request_header(0, name)

        def preprocess(self, data):
            name = self.header("x-name")
            self.calls.append(("pre", name, len(data), threading.current_thread() is threading.main_thread()))
            if name in begun:
                begun[name].set()
            words = [bytes(row["body"]).decode() for row in data]
            if any(word == "bad" for word in words):
                raise BadRows({idx: "bad row" for idx, word in enumerate(words) if word == "bad"})
            if any(word == "poison" for word in words):
                raise ValueError("poison")
            if any(word == "exit" for word in words):
                os._exit(3)
            if self.header("x-piece"):
                context = self.context
                send_intermediate_predict_response(["part "], {0: context.get_request_id(0)}, "", 200, context)
            if self.header("x-status"):
                for idx in range(len(data)):
                    self.context.set_response_status(int(self.header("x-status")), idx=idx)
            return name, words

        def inference(self, prepared):
            name, words = prepared
            self.calls.append(("run", name, len(words), threading.current_thread() is threading.main_thread()))
            if wait := self.header("x-until-begun"):
                assert begun[wait].wait(90), f"{wait} is not prepared while {name} runs"
            if any(word == "lost" for word in words):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if any(word == "late poison" for word in words):
                raise ValueError("late poison")
            if len(words) > 4:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return words

        def postprocess(self, words):
            if words == ["calls"]:
                return [self.calls]
            return [f"{self.header('x-name')} {self.context.get_request_id(idx)} {word}" for idx, word in enumerate(words)]

        def explain_handle(self, prepared, raw):
            return [f"why {len(raw)}"]

        def describe_handle(self):
            return "what"
"""
WITH_OVERLAP = {"overlapPreprocessing": True}


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER, model_config=WITH_OVERLAP)


def request(body: str, **headers: str) -> Request:
    return Request(
        body.encode(),
        [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    )


def replies(worker: Worker, *batches: list[Request]) -> list[list[tuple[int, bytes]]]:
    """Send all batches, then read their answers, as (status, body)."""
    answers: list[list[tuple[int, bytes]]] = []
    for number in [worker.begin(*batch) for batch in batches]:
        while (frame := worker.receive()) is not None and frame.kind is Kind.PIECE:
            worker.pieces += [(code, bytes(meta), bytes(body)) for code, meta, body in frame.items]
        assert frame is not None, "the worker ended"
        assert (frame.kind, frame.batch) == (Kind.REPLY, number)
        answers.append([(code, bytes(body)) for code, _, body in frame.items])
    return answers


def bodies(*replies: list[tuple[int, bytes]]) -> list[bytes]:
    return [body for answers in replies for _, body in answers]


def statuses(answers: list[tuple[int, bytes]]) -> list[int]:
    return [status for status, _ in answers]


def test_the_next_batch_is_prepared_while_the_model_runs_this_one(worker: Worker) -> None:
    assert worker.report["prefetch"] is True
    first, second = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b"), request("2")],
        [request("3", x_name="b", x_status="201")],
    )
    assert first == [(200, b"a id-0 1"), (200, b"a id-1 2")]
    assert second == [(201, b"b id-0 3")]
    calls = worker.ask_json(b"calls")
    assert sorted(calls[:4]) == [
        ["pre", "a", 2, False],
        ["pre", "b", 1, False],
        ["run", "a", 2, True],
        ["run", "b", 1, True],
    ]


def test_many_batches_are_answered_in_order_with_their_own_answers(worker: Worker) -> None:
    sizes = [number % 4 + 1 for number in range(60)]
    batches = [
        [request(f"{row}", x_name=f"batch-{number}") for row in range(size)]
        for number, size in enumerate(sizes)
    ]
    for number, answers in enumerate(replies(worker, *batches)):
        assert bodies(answers) == [
            f"batch-{number} id-{row} {row}".encode() for row in range(sizes[number])
        ]


def test_preprocessing_does_not_overlap_on_a_cpu_by_default_or_if_disabled(
    start_worker: StartWorker,
) -> None:
    for config in ({}, {"overlapPreprocessing": "auto"}, {"overlapPreprocessing": False}):
        worker = start_worker(HANDLER, model_config=config)
        assert worker.report["prefetch"] is False
        assert worker.ask_json(b"calls") == [
            ["pre", None, 1, True],
            ["run", None, 1, True],
        ]


@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, context):\n    return data and ['ok']",
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "class Own(BaseHandler):\n"
        "    def initialize(self, context): self.initialized = True\n"
        "    def handle(self, data, context): return ['ok']",
    ],
)
def test_a_handler_with_its_own_handle_is_served_without_overlap(
    start_worker: StartWorker, source: str
) -> None:
    worker = start_worker(source, model_config=WITH_OVERLAP)
    assert worker.report["prefetch"] is False
    assert worker.ask_bodies(b"") == [b"ok"]


def test_a_failure_while_preparing_fails_only_its_request_and_in_order(worker: Worker) -> None:
    first, with_bad_row, with_error, with_late_error, last = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b")],
        [request(body, x_name="b") for body in ("2", "bad", "3")],
        [request(body, x_name="c") for body in ("4", "poison", "5", "6")],
        [request(body, x_name="d") for body in ("7", "8", "9", "late poison")],
        [request("10", x_name="e")],
    )
    assert bodies(first, with_bad_row[:1], with_bad_row[2:], last) == [
        b"a id-0 1",
        b"b id-0 2",
        b"b id-2 3",
        b"e id-0 10",
    ]
    assert statuses(with_bad_row) == [200, 400, 200]
    assert statuses(with_error) == [200, 500, 200, 200]
    assert statuses(with_late_error) == [200, 200, 200, 500]
    assert b"ValueError: late poison" in with_late_error[3][1]


def test_batches_are_cut_once_one_does_not_fit_into_memory(worker: Worker) -> None:
    for answers in replies(worker, *[[request("x", x_name="a")] * 8] * 3):
        assert statuses(answers) == [200] * 8
    runs = [size for step, _, size, _ in worker.ask_json(b"calls") if step == "run"]
    assert runs == [8, *[4] * 6, 1]


def test_a_part_sent_while_preparing_is_delivered_in_order(worker: Worker) -> None:
    first, second = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b")],
        [request("2", x_name="b", x_piece="yes")],
    )
    assert bodies(first, second) == [b"a id-0 1", b"b id-0 2"]
    assert worker.pieces == [(0, b"ts_stream_next: true\r\n", b"part ")]


def test_explain_and_describe_requests_are_answered_in_order(worker: Worker) -> None:
    answers = replies(
        worker,
        [request("1", x_name="a")],
        [request("2", explain="True"), request("3", x_name="b")],
        [request("4", describe="True")],
    )
    assert bodies(*answers) == [b"a id-0 1", b"why 1", b"b id-1 3", b"what"]


def test_a_broken_device_ends_the_worker(worker: Worker) -> None:
    (answers,) = replies(worker, [request("lost", x_name="a")])
    assert statuses(answers) == [507]
    assert worker.receive() is None
    assert worker.ended() == 0


def test_the_worker_ends_when_its_socket_closes_or_has_invalid_bytes(
    start_worker: StartWorker,
) -> None:
    assert start_worker(HANDLER, model_config=WITH_OVERLAP).close() == 0
    worker = start_worker(HANDLER, model_config=WITH_OVERLAP)
    worker.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    assert worker.receive() is None
    assert worker.ended() == 0


def test_the_worker_answers_pings_while_the_model_runs(worker: Worker) -> None:
    worker.begin(request("1", x_name="a", x_until_begun="b"))
    worker.ping()
    worker.begin(request("2", x_name="b"))
    for _ in range(2):
        worker.expect(Kind.REPLY)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 7, 4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]  # torch's modules


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="streams and pinned memory need a CUDA device",
)
def test_on_a_gpu_images_get_the_same_answers_with_and_without_overlap(
    start_worker: StartWorker,
) -> None:
    torch.manual_seed(0)
    weights, images = io.BytesIO(), []
    torch.save(Net().state_dict(), weights)
    for number in range(48):
        file = io.BytesIO()
        Image.effect_noise((300, 280), 20 + number).convert("RGB").save(file, "JPEG")
        images.append(file.getvalue())
    source = f"import torch\n\n\n{inspect.getsource(Net)}"
    answers = []
    for config in ({}, {"overlapPreprocessing": False}):
        worker = start_worker(
            files={"net.py": source, "net.pth": weights.getvalue()},
            model={"modelFile": "net.py", "serializedFile": "net.pth"},
            handler="image_classifier",
            gpu_id=0,
            model_config=config,
        )
        assert (worker.report["device"], worker.report["prefetch"]) == ("cuda:0", not config)
        batches = [
            [Request(image) for image in images[start : start + 4]] for start in range(0, 48, 4)
        ]
        answers.append([json.loads(body) for body in bodies(*replies(worker, *batches))])
    for with_overlap, without_overlap in zip(*answers, strict=True):
        assert with_overlap == pytest.approx(without_overlap, abs=1e-4)


def test_a_large_body_that_came_alone_is_copied_only_when_prepared() -> None:
    body, shared = bytearray(b"its own memory"), memoryview(bytearray(b"read over"))
    (_, meta, view), (_, _, copied_view) = copy_items(
        [(0, bytearray(b"meta"), body), (0, b"", shared[:4])]
    )
    assert isinstance(view, memoryview)
    assert view.obj is body
    assert (meta, copied_view) == (b"meta", b"read")
    row = owned_bytes(view)
    # The handler may change its row, which must not change the buffer.
    row[:3] = b"HIS"
    assert body == b"its own memory"
