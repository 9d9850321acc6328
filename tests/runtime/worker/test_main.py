"""A worker process, from LOAD until its socket is closed."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.runtime.worker.conftest import Request, StartWorker, Worker
from tsx_runtime import wire
from tsx_runtime.wire import Kind
from tsx_runtime.worker.main import run

ECHO = """
    def handle(data, context):
        if data is None:
            return
        return [row["body"] for row in data]
"""
BROKEN_FORM = Request(b"", [(b"content-type", b"multipart/form-data")])


def test_batches_that_are_sent_early_are_answered_in_order(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(ECHO)
    assert worker.loaded
    assert worker.report["device"] == "cpu"
    assert worker.ask_bodies(b"a", b"", b"c" * 50_000) == [b"a", b"", b"c" * 50_000]
    bodies = [str(number).encode() * (number * 3000) for number in range(1, 8)]
    batches = [worker.begin(body) for body in bodies]
    frames = [worker.expect(Kind.REPLY) for _ in batches]
    assert [(frame.batch, bytes(frame.items[0][2])) for frame in frames] == list(
        zip(batches, bodies, strict=True)
    )


def test_an_answer_has_the_headers_and_status_that_the_handler_sets(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        def handle(data, context):
            if data is not None:
                context.set_response_content_type(1, "text/x-own")
                context.set_response_status(507, "full", idx=2)
                return ["plain", "typed", "verbatim"]
    """)
    plain_answer, typed_answer, failed_answer = worker.ask(b"", b"", b"")
    assert plain_answer == (200, {}, b"plain")
    assert typed_answer == (200, {"content-type": "text/x-own"}, b"typed")
    assert failed_answer == (507, {}, b"verbatim")


def test_the_worker_ends_when_its_socket_is_closed(start_worker: StartWorker) -> None:
    assert start_worker(ECHO).close() == 0


@pytest.mark.parametrize("first_bytes", [b"", b"".join(wire.encode(Kind.BATCH, 1)), b"junk" * 20])
def test_a_worker_without_a_load_order_ends(first_bytes: bytes) -> None:
    front, back = socket.socketpair()
    with front:
        # On Lambda, a worker may also be a thread.
        worker = threading.Thread(target=run, args=(back,), daemon=True)
        worker.start()
        front.sendall(first_bytes)
    worker.join(60)
    assert not worker.is_alive()
    assert back.fileno() == -1


def test_interrupt_and_terminate_do_not_end_a_worker(start_worker: StartWorker) -> None:
    worker = start_worker(ECHO)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    assert worker.ask_bodies(b"still here") == [b"still here"]


def test_a_worker_answers_pings_between_batches(start_worker: StartWorker) -> None:
    worker = start_worker(ECHO)
    batch = worker.begin(b"first")
    worker.send(Kind.PING, 7)
    assert worker.expect(Kind.REPLY).batch == batch
    assert worker.expect(Kind.PONG).batch == 7
    assert worker.ask_bodies(b"next") == [b"next"]
    # An unexpected PONG ends a worker.
    worker.send(Kind.PONG, 8)
    assert worker.receive() is None


def test_invalid_bytes_end_a_worker(start_worker: StartWorker) -> None:
    worker = start_worker(ECHO)
    worker.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    assert worker.receive() is None
    assert worker.ended() == 0


def test_a_worker_runs_in_the_directory_of_its_model(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        import os, sys, helper
        def handle(data, context):
            if data is not None:
                return [{"cwd": os.getcwd(), "path": sys.path[0], "helper": helper.WHO, "text": open("notes.txt").read()}]
        """,
        files={"helper.py": "WHO = 'beside the handler'", "notes.txt": "hello"},
    )
    answer = worker.ask_json()
    assert answer["cwd"] == answer["path"]
    assert Path(answer["cwd"]).name == "model-0"
    assert (answer["helper"], answer["text"]) == ("beside the handler", "hello")


@pytest.mark.parametrize("shared", [False, True])
def test_torch_uses_the_threads_of_the_order_or_of_a_changed_share(
    start_worker: StartWorker, shared: bool
) -> None:
    source = """
        import torch
        def handle(data, context):
            if data is not None:
                return [[torch.get_num_threads(), torch.cuda.is_initialized()]]
    """
    worker = start_worker(source, threads=1 + shared, shares_cores=shared)
    assert worker.ask_json() == [1 + shared, False]
    if shared:
        worker.send(Kind.THREADS, 1)
        assert worker.ask_json() == [1, False]


def test_a_handlers_own_number_of_threads_is_kept(
    start_worker: StartWorker,
) -> None:
    source = """
        import torch
        def handle(data, context):
            if data is None:
                torch.set_num_threads(3)
            else:
                return [[torch.get_num_threads()]]
    """
    assert start_worker(source, threads=2).ask_json() == [3]


def test_a_handler_sees_the_inputs_and_the_context(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        def handle(data, context):
            if data is not None:
                return [{"row": {**row, "q": row["q"].decode()}, "id": context.get_request_id(idx),
                         "agent": context.get_request_header(idx, "user-agent"),
                         "key": [context.model_yaml_config[1], str(context.model_yaml_config["day"])],
                         "dir": context.system_properties["batch_size"]}
                        for idx, row in enumerate(data)]
        """,
        model_config={1: 5, "day": datetime.date(2025, 3, 17)},
    )
    request = Request(
        b'{"x": 1}', [(b"User-Agent", b"pytest"), (b"Content-Type", b"application/json")], b"q=1"
    )
    assert worker.ask_json(request) == {
        "row": {"q": "1", "body": {"x": 1}},
        "id": "id-0",
        "agent": "pytest",
        "key": [5, "2025-03-17"],
        "dir": 8,
    }


def test_a_batch_of_broken_forms_does_not_reach_the_handler(start_worker: StartWorker) -> None:
    worker = start_worker("""
        def handle(data, context):
            assert data is None, "called"
    """)
    assert worker.ask_statuses(BROKEN_FORM) == [400]


FAILURES = (
    ("raise ValueError('boom')", 500, "Prediction failed: ValueError: boom"),
    ("import sys; sys.exit(3)", 500, "Prediction failed: SystemExit: 3"),
    ("raise KeyboardInterrupt", 500, "Prediction failed: KeyboardInterrupt"),
    ("from ts.service import PredictionException as No; raise No('no', 418)", 418, "no"),
    ("from tsx_runtime.worker.exceptions import BadRows; raise BadRows({9: 'none'})", 400, "none"),
    ("answers = None", 500, "Invalid model predict output"),
    ("answers = ['only one']", 500, "response mismatched, expect: 2, got: 1. Handler handler.py"),
    # This failure comes last, since later batches are cut.
    ("raise MemoryError", 507, "Out of resources"),
)


def test_a_failure_answers_all_requests_of_its_batch_and_the_worker_survives(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        def handle(data, context):
            if data is None:
                return
            names = {}
            exec(data[0]["body"], names)
            return names["answers"]
    """)
    for statement, status, reason in FAILURES:
        for answer in worker.ask(*[statement.encode()] * 2):
            assert answer.status == status, statement
            assert reason in answer.message
        assert worker.ask_bodies(b"answers = ['fine']") == [b"fine"]


FAILS_ON_X = """
    import os
    def handle(data, context):
        if data is None:
            os.dup2(os.open("stderr.txt", os.O_CREAT | os.O_WRONLY), 2)
            return
        if any(row["body"] == b"x" for row in data):
            raise ValueError("boom")
        return [f"{context.get_request_id(idx)} of {len(data)}" for idx in range(len(data))]
"""


def test_a_failure_is_logged_with_the_handlers_lines_and_repeats_are_counted(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(FAILS_ON_X)
    assert worker.ask_statuses(*b"a b x c d e f g h x j k".split()).count(500) == 2
    worker.close()
    log = (worker.directory / "stderr.txt").read_text()
    assert [line.partition("): ")[2] or line.partition(" | ")[2] for line in log.splitlines()] == [
        "the handler failed for a batch of 12 requests; 12 of them are retried separately: ValueError: boom",
        "the handler failed for the request id-2: ValueError: boom",
        '  handler.py:8 in handle: raise ValueError("boom")',
        "the same failure once more, for the request id-9: ValueError: boom (handler.py:8 in handle)",
    ]


def test_a_model_may_disable_retries_of_batches(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(FAILS_ON_X, model_config={"retryFailedBatch": False})
    assert worker.ask_statuses(*b"a x c d".split()) == [500] * 4
    worker.close()
    log = (worker.directory / "stderr.txt").read_text()
    assert log.count("handler.py:8") == 1
    assert "failed for the requests id-0, id-1, id-2, id-3: ValueError: boom\n" in log


OUT_OF_MEMORY = """
    import torch
    sizes = []
    def handle(data, context):
        if data is None:
            return
        sizes.append(len(data))
        if len(data) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if data[0]["body"] == b"sizes":
            return [sizes]
        return [row["body"] for row in data]
"""


def test_batches_are_cut_once_one_does_not_fit_into_device_memory(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(OUT_OF_MEMORY)
    bodies = [str(number).encode() for number in range(10)]
    assert worker.ask_bodies(*bodies) == bodies
    labels = {"worker": "9000", "ModelName": "m", "Level": "Model"}
    assert [
        (metric["name"], metric["type"], metric["value"], metric["dimensions"])
        for metric in worker.metrics
    ] == [
        ("tsx_oom_retries_total", "counter", 2, labels),
        ("tsx_batch_ceiling", "gauge", 2, labels),
    ]
    assert worker.ask_bodies(*bodies) == bodies
    assert worker.metrics == []
    assert worker.ask_json(b"sizes") == [10, 5, 2, 2, 1, 2, 2, 1] + [2] * 5 + [1]


def test_later_batches_are_cut_even_without_retries(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(OUT_OF_MEMORY, model_config={"retryFailedBatch": False})
    assert worker.ask_statuses(*[b"x"] * 6) == [507] * 6
    assert worker.ask_statuses(*[b"x"] * 6) == [200] * 6


def test_a_device_lost_during_the_search_ends_the_worker(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        def handle(data, context):
            if data is not None:
                raise ValueError("boom") if len(data) > 1 else RuntimeError("CUDA error: an illegal memory access was encountered")
    """)
    assert worker.ask_statuses(*[b""] * 8)[0] == 507
    assert worker.receive() is None
    assert worker.ended() == 0


def wait_for_memory(worker: Worker, limit: int) -> None:
    """Wait until the worker's memory is below `limit`; it frees the batch after the answer."""
    process, deadline = psutil.Process(worker.process.pid), time.monotonic() + 60
    while (size := process.memory_info().rss) > limit:
        assert time.monotonic() < deadline, f"{size} bytes are held"
        time.sleep(0.01)


def test_an_idle_worker_holds_no_body(start_worker: StartWorker) -> None:
    worker = start_worker(ECHO, max_response_size=1 << 30)
    worker.ask(b"warm")
    initial_bytes, size = psutil.Process(worker.process.pid).memory_info().rss, 80 << 20
    worker.ask(b"x" * size)
    wait_for_memory(worker, initial_bytes + size // 4)


def test_a_log_line_has_its_time_and_process(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        import logging, os

        def handle(data, context):
            (handler,) = logging.getLogger().handlers
            record = logging.LogRecord("mine", logging.WARNING, "", 0, "careful", (), None)
            return data and [[handler.format(record), os.getpid()]]
    """)
    line, pid = worker.ask_json()
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} WARNING mine \(pid {pid}\): careful", line
    )


def test_the_time_of_a_batch_is_reported_once_a_second(start_worker: StartWorker) -> None:
    worker = start_worker("def handle(data, context):\n    return data and ['ok']")
    times, start = [], time.monotonic()
    for _ in range(3):
        worker.ask(b"x")
        times += worker.prediction_times
    # On a slow machine, the batches may take more than a second.
    assert 1 <= len(times) <= 1 + (time.monotonic() - start)
    assert all(0 <= time["value"] < 10_000 and time["unit"] == "ms" for time in times)


def test_metrics_are_sent_only_with_the_next_reply(start_worker: StartWorker) -> None:
    declared_metric = {"name": "Own", "type": "histogram", "unit": "count"}
    worker = start_worker(
        """
        from ts.metrics.metric_type_enum import MetricTypes

        def handle(data, context):
            if data is None:
                context.metrics.add_counter("Loaded", 1)
            elif data[0]["body"]:
                own = context.metrics.get_metric("Own", MetricTypes.HISTOGRAM)
                own.add_or_update(4, [context.model_name, "Model"])
            return data and ["ok"]
        """,
        model_metrics=[{**declared_metric, "dimensions": ["ModelName", "Level"]}],
    )
    labels = {"ModelName": "m", "Level": "Model"}
    worker.ask(b"x")
    assert worker.metrics == [
        {"name": "Loaded", "type": "counter", "unit": "count", "value": 1, "dimensions": labels},
        {**declared_metric, "value": 4, "dimensions": labels},
    ]
    worker.ask(b"")
    assert worker.metrics == []


def test_an_answer_in_parts_is_sent_as_pieces_and_a_last_part(start_worker: StartWorker) -> None:
    worker = start_worker("""
        from ts.handler_utils.utils import send_intermediate_predict_response
        def handle(data, context):
            if data is None:
                return
            context.set_response_content_type(0, "text/event-stream")
            for word in ("one ", "two "):
                send_intermediate_predict_response([word, {"w": word}], context.request_ids, "Intermediate", 200, context)
            return ["three", "end"]
    """)
    bodies = worker.ask_bodies(b"", b"")
    assert worker.pieces == [
        (0, b"content-type: text/event-stream\r\nts_stream_next: true\r\n", b"one "),
        (1, b"ts_stream_next: true\r\n", b'{\n  "w": "one "\n}'),
        (0, b"", b"two "),
        (1, b"", b'{\n  "w": "two "\n}'),
    ]
    assert bodies == [b"three", b"end"]


def test_a_part_reaches_its_request_if_a_broken_request_was_left_out(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        from ts.protocol.otf_message_handler import send_intermediate_predict_response
        def handle(data, context):
            if data is not None:
                send_intermediate_predict_response(["part"], {0: context.get_request_id(0)}, "", 200, context)
                return ["end"]
    """)
    worker.ask(BROKEN_FORM, b"")
    assert worker.pieces == [(1, b"ts_stream_next: true\r\n", b"part")]


def test_a_part_that_cannot_be_sent_fails_the_answer(start_worker: StartWorker) -> None:
    worker = start_worker("""
        from ts.handler_utils.utils import send_intermediate_predict_response as send
        def handle(data, context):
            if data is not None:
                text, ids, message, status = eval(data[0]["body"])
                send(text, ids, message, status, context)
                return ["end"]
    """)
    for arguments, reason in (
        ("['x'], {0: 'id-0'}, 'model fell over', 500", "model fell over"),
        ("['x', 'y'], {0: 'id-0'}, '', 200", "number of batch response mismatched"),
        ("[{1}], {0: 'id-0'}, '', 200", "Unsupported model output data type"),
        ("['x' * 200_000], {0: 'id-0'}, '', 200", "max_response_size"),
    ):
        (answer,) = worker.ask(arguments.encode())
        assert answer.status == 500
        assert reason in answer.message
    assert worker.pieces == []


def test_a_part_after_the_answer_is_not_sent(start_worker: StartWorker) -> None:
    worker = start_worker("""
        import threading
        from ts.handler_utils.utils import send_intermediate_predict_response
        begun, events = threading.Event(), []
        def late(ids, wait):
            wait()
            send_intermediate_predict_response(["late"], ids, "", 200, context)
            events.append("went on")
        def handle(data, call):
            global context, thread
            context = call
            if data is None:
                return
            if data[0]["body"]:
                thread = threading.Thread(target=late, args=({1: context.get_request_id(1)}, begun.wait))
                thread.start()
                return ["in time"] * 2
            begun.set()
            thread.join()
            return [events.pop()]
    """)
    worker.ask(b"begin", b"begin")
    assert worker.ask_bodies(b"") == [b"went on"]
    assert worker.pieces == []


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps memory")
def test_memory_reserved_for_the_next_batch_is_freed_if_none_comes(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        def handle(data, context):
            return data and ["ok"] * len(data)
    """)
    worker.ask(b"warm")
    initial_bytes, size = psutil.Process(worker.process.pid).memory_info().rss, 16 << 20
    for _ in range(2):
        worker.ask(*[b"x" * size] * 6)
    for _ in range(2):
        worker.ping()
    wait_for_memory(worker, initial_bytes + 2 * size)


def test_a_process_that_the_handler_forks_does_not_use_the_socket(
    start_worker: StartWorker,
) -> None:
    """Use a child that returns from the handler, one that calls sys.exit, and one that stays."""
    worker = start_worker("""
        import os, sys, time

        def handle(data, context):
            if data is None:
                return
            action = data[0]["body"].decode()
            if action == "end":
                os._exit(3)
            child = os.fork()
            if child == 0:
                if action == "exit":
                    sys.exit(0)
                if action == "stay":
                    time.sleep(1000)
                return [b"the child's"]
            if action != "stay":
                os.waitpid(child, 0)
            return [str(child)]
    """)
    for action in (b"return", b"exit"):
        assert worker.ask_statuses(action) == [200]
        assert worker.ask_bodies(action) != [b"the child's"]
    child = worker.ask_json(b"stay")
    try:
        worker.begin(b"end")
        assert worker.receive() is None, "the child holds the socket open"
    finally:
        os.kill(child, signal.SIGKILL)


PROCESSES = """
    import asyncio, multiprocessing, os, signal, subprocess, sys, time
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

    from torch.utils.data import DataLoader, Dataset

    SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]

    def end(method):
        process = multiprocessing.get_context(method).Process(target=time.sleep, args=(100,))
        process.start()
        process.terminate()
        process.join(60)
        return process.exitcode

    def fork():
        return end("fork")

    def fork_in_a_thread():
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(end, "fork").result()

    def interrupt():
        began = multiprocessing.Event()
        process = multiprocessing.Process(target=lambda: (began.set(), time.sleep(100)))
        process.start()
        began.wait()
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        return process.exitcode

    def spawn():
        return end("spawn")

    def forkserver():
        return end("forkserver")

    def pool():
        with multiprocessing.Pool(2) as pool:
            result = pool.map(abs, [-1, 2])
        pool.join()
        return result

    def executor():
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(abs, [-1, 2]))

    class Numbers(Dataset):
        def __init__(self):
            self.make = lambda number: number + 1

        def __len__(self):
            return 4

        def __getitem__(self, number):
            return self.make(number)

    def loader():
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
        result = [batch.tolist() for batch in loader]
        del loader
        return result

    def program():
        process = subprocess.Popen(SLEEP)
        process.terminate()
        return process.wait(60)

    def asyncio_program():
        async def run():
            process = await asyncio.create_subprocess_exec(*SLEEP)
            process.terminate()
            return await asyncio.wait_for(process.wait(), 60)

        return asyncio.run(run())

    def printing_fork():
        child = os.fork()
        if child == 0:
            print("a line of the child", flush=True)
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def handle(data, context):
        return data and [globals()[row["body"].decode()]() for row in data]
"""
ENDED = -signal.SIGTERM
# The Dataset has a lambda, which Python 3.14 would have to pickle; TorchServe fails too.
FORKS = pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="this Python pickles a Dataset"
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("fork", ENDED),
        ("fork_in_a_thread", ENDED),
        ("interrupt", 1),
        ("spawn", ENDED),
        ("forkserver", ENDED),
        ("pool", [1, 2]),
        ("executor", [1, 2]),
        pytest.param("loader", [[1, 2], [3, 4]], marks=FORKS),
        ("program", ENDED),
        ("asyncio_program", ENDED),
        ("printing_fork", 5),
    ],
)
def test_a_handler_can_end_the_processes_that_it_starts(
    processes_worker: Worker, function: str, result: object
) -> None:
    (answer,) = processes_worker.ask(function.encode())
    assert (answer.status, json.loads(answer.body)) == (200, result)


@pytest.fixture(scope="module")
def processes_worker(start_shared_worker: StartWorker) -> Worker:
    return start_shared_worker(PROCESSES)


def test_a_handler_sees_its_own_file_as_the_command_line(start_worker: StartWorker) -> None:
    worker = start_worker("""
        import argparse, sys

        options = argparse.ArgumentParser().parse_args()

        def handle(data, context):
            return data and [{"argv": sys.argv, "file": __file__} for _ in data]
    """)
    names = worker.ask_json()
    assert names["argv"] == [names["file"]]


def test_a_process_forked_during_loading_does_not_become_a_worker(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        "import os\n\nchild = os.fork()\n\ndef handle(data, context):\n    return data and [str(child)] * len(data)\n"
    )
    assert worker.loaded
    assert [worker.ask_json() > 0 for _ in range(3)] == [True] * 3


def test_a_load_error_with_any_text_is_reported(start_worker: StartWorker) -> None:
    worker = start_worker("raise RuntimeError('no \\udcff' + 'x' * 3_000_000)\n")
    assert not worker.loaded
    worker.report["message"].encode()
    worker.report["traceback"].encode()
    assert len(worker.report["message"]) < 10_000
    assert len(worker.report["traceback"]) < 40_000
