"""Reports of a handler's errors and output to the front end, which have a limited size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.worker.conftest import StartWorker, Worker
from tsx_runtime.worker.diagnostics.reporting import (
    MAX_ERRORS,
    MAX_LINE_CHARS,
    MAX_LINES,
    ReportBuffer,
)

RAISES = """
import sys
print("while it loads")

def handle(data, context):
    if data is None:
        return None
    print("seen")
    print("to the other", file=sys.stderr)
    raise ValueError("no such image")
"""


def lines_of(worker: Worker) -> list[tuple[str, str, list[str]]]:
    """End the worker, and return its output as (stream, text, ids of requests)."""
    worker.sock.shutdown(1)
    assert worker.receive() is None
    lines = [line for report in worker.reports for line in report["lines"]]
    return [(stream, text, ids) for _, stream, text, ids in lines]


def test_tracebacks_and_output_are_reported(start_worker: StartWorker) -> None:
    worker = start_worker(RAISES)
    assert worker.ask_statuses(b"x") == worker.ask_statuses(b"x") == [500]
    lines = lines_of(worker)
    errors = [error for report in worker.reports for error in report["errors"]]
    assert sum(error["count"] for error in errors) == 2
    assert "the handler failed for the request id-0" in errors[0]["message"]
    assert errors[0]["request_ids"] == ["id-0"] * errors[0]["count"]
    assert "handler.py" in errors[0]["traceback"]
    assert errors[0]["traceback"].rstrip().endswith("ValueError: no such image")
    assert [line for line in lines if line[0] == "stdout"] == [
        ("stdout", "while it loads", []),
        ("stdout", "seen", ["id-0"]),
        ("stdout", "seen", ["id-0"]),
    ]
    assert [text for stream, text, _ in lines if stream == "stderr"].count("to the other") == 2


def test_the_output_of_a_model_that_does_not_load_is_reported(start_worker: StartWorker) -> None:
    worker = start_worker("print('half way')\nraise OSError('no weights')\n")
    assert not worker.loaded
    assert ("stdout", "half way", []) in lines_of(worker)


FORKS = """
import os

def handle(data, context):
    if data is None:
        return None
    child = os.fork()
    if not child:
        print("of the child")
        os._exit(0)
    os.waitpid(child, 0)
    print("of the worker")
    return ["done"] * len(data)
"""


def test_a_process_that_a_handler_forks_reports_nothing(start_worker: StartWorker) -> None:
    worker = start_worker(FORKS)
    assert worker.ask_statuses(b"x") == [200]
    assert [text for _, text, _ in lines_of(worker)] == ["of the worker"]


def test_equal_errors_are_counted_and_different_ones_limited() -> None:
    buffer = ReportBuffer()
    for number in range(5):
        buffer.add_error(f"request {number}", "Traceback: the same", [f"id-{number}"] * 20)
    for number in range(3 * MAX_ERRORS):
        buffer.add_error("other", f"Traceback: {number}")
    report = buffer.take()
    assert report is not None
    assert len(report["errors"]) == MAX_ERRORS
    assert report["errors"][0] == {
        "message": "request 4",
        "traceback": "Traceback: the same",
        "count": 5,
        "request_ids": ["id-2"] * 10 + ["id-3"] * 20 + ["id-4"] * 20,
    }
    assert buffer.take() is None


@given(
    st.lists(
        st.lists(
            st.sampled_from(["a", "b\n", "\n", "long" * MAX_LINE_CHARS, "c\r\n"]), max_size=4
        ).map("".join),
        max_size=40,
    )
)
def test_reports_have_the_newest_lines_up_to_a_limit(pieces: list[str]) -> None:
    buffer = ReportBuffer()
    for piece in pieces:
        buffer.add_output("stdout", piece)
    report = buffer.take() or {"lines": [], "lost": 0}
    lines = "".join(pieces).split("\n")[:-1]
    assert len(report["lines"]) == min(MAX_LINES, len(lines))
    assert report["lost"] == len(lines) - len(report["lines"])
    for (_, _, text, _), printed in zip(report["lines"], lines[-MAX_LINES:], strict=False):
        assert len(text) <= MAX_LINE_CHARS
        assert printed.rstrip("\r").startswith(text[:10]) or len(printed) > MAX_LINE_CHARS
