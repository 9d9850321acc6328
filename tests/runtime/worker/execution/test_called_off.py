"""Cancelled streams: the handler is stopped at its next part if all clients have left."""

from __future__ import annotations

import threading

import pytest

from tests.runtime.worker.conftest import StartWorker, Worker
from tsx_runtime import wire
from tsx_runtime.wire import Kind

HANDLER = """
    from pathlib import Path
    from ts.handler_utils.utils import send_intermediate_predict_response

    def handle(data, context):
        if data is None:
            return None
        if len(data) > 1:
            send_intermediate_predict_response(["begun"], {0: context.get_request_id(0)}, "", 200, context)
            while not Path("go").exists():
                pass
            send_intermediate_predict_response(["begun"], {0: context.get_request_id(0)}, "", 200, context)
            raise ValueError("not together")
        word = bytes(data[0]["body"])
        if word == b"forever":
            try:
                while True:
                    try:
                        send_intermediate_predict_response(["part"], context.request_ids, "", 200, context)
                    except Exception:
                        pass  # as careless handlers do
            finally:
                Path("ended").touch()
        return [f"{word[:1].decode()}{len(word)}"]
"""


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker(HANDLER)


def read_reply(worker: Worker) -> wire.Frame:
    """Skip pieces up to the next reply."""
    while (frame := worker.receive()) is not None:
        if frame.kind is Kind.REPLY:
            return frame
    raise AssertionError("the worker ended")


def test_a_cancelled_stream_is_stopped_and_the_next_batch_is_answered(worker: Worker) -> None:
    cancelled_batch = worker.begin(b"forever")
    worker.expect(Kind.PIECE)
    # In the socket, the next batch comes before the CANCEL.
    next_batch = worker.begin(b"a" * 1000)
    worker.send(Kind.PING, 0)
    worker.send(Kind.CANCEL, cancelled_batch)
    reply = read_reply(worker)
    assert (reply.batch, reply.items[0][0]) == (cancelled_batch, 499)
    assert (worker.directory / "ended").exists()
    reply = read_reply(worker)
    assert (reply.batch, bytes(reply.items[0][2])) == (next_batch, b"a1000")
    worker.expect(Kind.PONG)


def test_a_cancellation_too_late_or_too_early_is_ignored(worker: Worker) -> None:
    assert worker.ask_bodies(b"a") == [b"a1"]
    worker.send(Kind.CANCEL, 1)
    worker.send(Kind.CANCEL, 3)
    assert worker.ask_bodies(b"bb") == [b"b2"]
    assert worker.ask_bodies(b"ccc") == [b"c3"]


def test_a_streaming_worker_ends_when_its_front_end_disconnects(worker: Worker) -> None:
    worker.begin(b"forever")
    worker.expect(Kind.PIECE)
    assert worker.close() == 0


@pytest.mark.parametrize("size", [100, 70_000, 300_000])
def test_batches_read_ahead_do_not_overwrite_the_current_one(worker: Worker, size: int) -> None:
    together = worker.begin(b"A" * size, b"B" * size)
    worker.expect(Kind.PIECE)
    early_items = {101: b"C", 102: b"D"}
    meta = wire.request_meta("id", b"", ())
    data = b"".join(
        bytes(part)
        for batch, letter in early_items.items()
        for part in wire.encode(Kind.BATCH, batch, [(0, meta, letter * size)] * 2)
    )
    worker.sock.sendall(data[:100])
    # The rest may not fit into the socket's buffer.
    sender = threading.Thread(target=worker.sock.sendall, args=(data[100:],))
    sender.start()
    (worker.directory / "go").touch()
    reply = read_reply(worker)
    assert reply.batch == together
    # The second request is retried alone, which reads its bytes again.
    assert bytes(reply.items[1][2]) == b"B%d" % size
    for batch, letter in early_items.items():
        reply = read_reply(worker)
        assert (reply.batch, bytes(reply.items[1][2])) == (batch, letter + b"%d" % size)
    sender.join()


def test_a_stream_of_a_stateful_model_is_not_stopped(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        from pathlib import Path
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            send_intermediate_predict_response(["a"], context.request_ids, "", 200, context)
            while not Path("go").exists():
                pass
            send_intermediate_predict_response(["b"], context.request_ids, "", 200, context)
            return ["kept"]
        """,
        stateful=True,
    )
    batch = worker.begin(b"")
    worker.expect(Kind.PIECE)
    worker.send(Kind.CANCEL, batch)
    (worker.directory / "go").touch()
    assert bytes(read_reply(worker).items[0][2]) == b"kept"
