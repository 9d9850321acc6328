"""The next batch is prepared while the model runs this one: each sees its own requests, and answers
come in order.
"""

from __future__ import annotations

import inspect
import io
import json

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import Answer, Request, StartWorker, Worker
from tsx_runtime.wire import Kind
from tsx_runtime.worker.codecs.requests import own
from tsx_runtime.worker.execution.prefetch import keep

HANDLER = """
    import os, threading, time, torch
    from ts.torch_handler.base_handler import BaseHandler
    from ts.handler_utils.utils import send_intermediate_predict_response
    from tsx_runtime.worker.exceptions import BadRows

    begun = {name: threading.Event() for name in "abcdefgh"}   # whose preprocess has begun
    done = {name: threading.Event() for name in "abcdefgh"}    # whose postprocess has ended

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
ON = {"overlapPreprocessing": True}


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER, model_config=ON)


def request(word: str, **headers: str) -> Request:
    return Request(
        word.encode(),
        [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    )


def replies(worker: Worker, *batches: list[Request]) -> list[list[Answer]]:
    """All batches are sent before the first answer is read."""
    numbers = [worker.begin(*batch) for batch in batches]
    found: list[list[Answer]] = []
    while len(found) < len(numbers):
        frame = worker.receive()
        assert frame is not None, "the worker ended"
        assert frame.batch == numbers[len(found)]
        if frame.kind is Kind.PIECE:
            worker.pieces += [(code, bytes(meta), bytes(body)) for code, meta, body in frame.items]
            continue
        assert frame.kind is Kind.REPLY
        found.append(
            [
                Answer(
                    code, {"content-type": "application/json"} if code >= 400 else {}, bytes(body)
                )
                for code, _, body in frame.items
            ]
        )
    return found


def test_the_next_batch_is_prepared_while_the_model_runs_this_one(worker: Worker) -> None:
    assert worker.report["prefetch"] is True
    first, second = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b"), request("2")],
        [request("3", x_name="b", x_status="201")],
    )
    assert [(answer.status, answer.body) for answer in first] == [
        (200, b"a id-0 1"),
        (200, b"a id-1 2"),
    ]
    assert [(answer.status, answer.body) for answer in second] == [(201, b"b id-0 3")]
    calls = json.loads(worker.ask(b"calls")[0].body)
    assert sorted(calls[:4]) == [
        ["pre", "a", 2, False],
        ["pre", "b", 1, False],
        ["run", "a", 2, True],
        ["run", "b", 1, True],
    ]


def test_many_batches_are_answered_in_their_order_and_each_with_its_own(worker: Worker) -> None:
    batches = [
        [request(f"{row}", x_name=f"batch-{number}") for row in range(number % 4 + 1)]
        for number in range(60)
    ]
    for number, answers in enumerate(replies(worker, *batches)):
        assert [answer.body.decode() for answer in answers] == [
            f"batch-{number} id-{row} {row}" for row in range(number % 4 + 1)
        ]


def test_by_itself_nothing_overlaps_on_a_cpu_nor_where_it_is_turned_off(
    start_worker: StartWorker,
) -> None:
    for config in ({}, {"overlapPreprocessing": "auto"}, {"overlapPreprocessing": False}):
        worker = start_worker(HANDLER, model_config=config)
        assert worker.report["prefetch"] is False
        assert json.loads(worker.ask(b"calls")[0].body) == [
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
def test_a_handler_that_handles_in_its_own_way_is_served_without(
    start_worker: StartWorker, source: str
) -> None:
    worker = start_worker(source, model_config=ON)
    assert worker.report["prefetch"] is False
    assert worker.ask(b"")[0].body == b"ok"


def test_what_fails_ahead_fails_in_its_turn_and_its_neighbours_are_answered(worker: Worker) -> None:
    first, bad, poison, late, last = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b")],
        [request(word, x_name="b") for word in ("2", "bad", "3")],
        [request(word, x_name="c") for word in ("4", "poison", "5", "6")],
        [request(word, x_name="d") for word in ("7", "8", "9", "late poison")],
        [request("10", x_name="e")],
    )
    assert [answer.body for answer in first] == [b"a id-0 1"]
    assert [answer.status for answer in bad] == [200, 400, 200]
    assert [bad[0].body, bad[2].body] == [b"b id-0 2", b"b id-2 3"]
    assert [answer.status for answer in poison] == [200, 500, 200, 200]
    assert [answer.status for answer in late] == [200, 200, 200, 500]
    assert "ValueError: late poison" in late[3].message
    assert [answer.body for answer in last] == [b"e id-0 10"]


def test_what_does_not_fit_the_memory_is_cut_and_later_batches_too(worker: Worker) -> None:
    for answers in replies(
        worker, *([request("x", x_name="a") for _ in range(8)] for _ in range(3))
    ):
        assert [answer.status for answer in answers] == [200] * 8
    runs = [size for step, _, size, _ in json.loads(worker.ask(b"calls")[0].body) if step == "run"]
    assert runs == [8, *[4] * 6, 1]


def test_a_part_that_is_sent_while_preparing_waits_for_its_turn(worker: Worker) -> None:
    first, second = replies(
        worker,
        [request("1", x_name="a", x_until_begun="b")],
        [request("2", x_name="b", x_piece="yes")],
    )
    assert [answer.body for answer in first + second] == [b"a id-0 1", b"b id-0 2"]
    assert worker.pieces == [(0, b"ts_stream_next: true\r\n", b"part ")]


def test_explanations_and_descriptions_are_made_in_their_turn(worker: Worker) -> None:
    first, mixed, what = replies(
        worker,
        [request("1", x_name="a")],
        [request("2", explain="True"), request("3", x_name="b")],
        [request("4", describe="True")],
    )
    assert [answer.body for answer in first + mixed + what] == [
        b"a id-0 1",
        b"why 1",
        b"b id-1 3",
        b"what",
    ]


def test_a_broken_device_ends_the_worker_and_the_next_batch_is_left(worker: Worker) -> None:
    (answers,) = replies(worker, [request("lost", x_name="a")])
    assert answers[0].status == 507
    assert worker.receive() is None
    assert worker.ended() == 0


def test_the_worker_ends_when_its_socket_is_closed_or_what_comes_is_no_frame(
    start_worker: StartWorker,
) -> None:
    assert start_worker(HANDLER, model_config=ON).close() == 0
    worker = start_worker(HANDLER, model_config=ON)
    worker.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    assert worker.receive() is None
    assert worker.ended() == 0


def test_it_shows_life_also_while_the_model_runs(worker: Worker) -> None:
    worker.begin(request("1", x_name="a", x_until_begun="b"))
    worker.send(Kind.PING, 0)
    frame = worker.receive()
    assert frame is not None
    assert frame.kind is Kind.PONG
    worker.begin(request("2", x_name="b"))
    assert [worker.receive().kind for _ in range(2)] == [Kind.REPLY] * 2  # type: ignore[union-attr]  # a worker that lives


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
    reason="needs a CUDA device: streams and pinned memory cannot be had without one",
)
def test_on_a_gpu_images_get_the_same_answers_with_and_without(start_worker: StartWorker) -> None:
    torch.manual_seed(0)
    weights, images = io.BytesIO(), []
    torch.save(Net().state_dict(), weights)
    for number in range(48):
        file = io.BytesIO()
        Image.effect_noise((300, 280), 20 + number).convert("RGB").save(file, "JPEG")
        images.append(file.getvalue())
    source = f"import torch\n\n\n{inspect.getsource(Net)}"
    found = []
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
        found.append(
            [
                [json.loads(answer.body) for answer in answers]
                for answers in replies(worker, *batches)
            ]
        )
    for with_overlap, without in zip(*found, strict=True):
        for one, other in zip(with_overlap, without, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_of_what_waits_to_be_prepared_a_large_body_that_came_alone_is_not_copied() -> None:
    body, shared = bytearray(b"its own memory"), memoryview(bytearray(b"read over"))
    (_, meta, kept), (_, _, copied) = keep([(0, bytearray(b"meta"), body), (0, b"", shared[:4])])
    assert isinstance(kept, memoryview)
    assert kept.obj is body
    assert (meta, copied) == (b"meta", b"read")
    row = own(kept)
    row[:3] = b"HIS"  # the handler's own
    assert body == b"its own memory"
