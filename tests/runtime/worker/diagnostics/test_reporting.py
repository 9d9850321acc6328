"""What a handler raises and prints is told to the front end, in reports that are bounded whatever
it does.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.worker.diagnostics.reporting import LONGEST, MOST, MOST_ERRORS, ReportBuffer

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


def test_tracebacks_and_output_are_reported(start_worker) -> None:
    worker = start_worker(RAISES)
    for _ in range(2):
        (answer,) = worker.ask(b"x")
        assert answer.status == 500
    worker.sock.shutdown(1)  # it ends, and tells the rest first
    assert worker.receive() is None
    errors = [error for report in worker.reports for error in report["errors"]]
    assert sum(error["count"] for error in errors) == 2
    assert "the handler failed for the request id-0" in errors[0]["message"]
    assert errors[0]["request_ids"] == ["id-0"] * errors[0]["count"]
    assert "handler.py" in errors[0]["traceback"]
    assert errors[0]["traceback"].rstrip().endswith("ValueError: no such image")
    lines = [(stream, text) for report in worker.reports for _, stream, text, _ in report["lines"]]
    assert [text for stream, text in lines if stream == "stdout"] == [
        "while it loads",
        "seen",
        "seen",
    ]
    assert [text for stream, text in lines if stream == "stderr"].count("to the other") == 2
    ids = {text: ids for report in worker.reports for _, _, text, ids in report["lines"]}
    assert (ids["while it loads"], ids["seen"]) == ([], ["id-0"])


def test_what_a_model_that_does_not_load_printed_is_reported(start_worker) -> None:
    worker = start_worker("print('half way')\nraise OSError('no weights')\n")
    assert not worker.loaded
    assert worker.receive() is None
    assert "half way" in [text for report in worker.reports for _, _, text, _ in report["lines"]]


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


def test_a_process_that_a_handler_forks_tells_nothing_and_waits_for_nobody(start_worker) -> None:
    worker = start_worker(FORKS)
    assert [answer.status for answer in worker.ask(b"x")] == [200]
    worker.sock.shutdown(1)
    assert worker.receive() is None
    assert [text for report in worker.reports for _, _, text, _ in report["lines"]] == [
        "of the worker"
    ]


def test_the_same_error_is_counted_and_different_ones_are_bounded() -> None:
    gathered = ReportBuffer()
    for number in range(5):
        gathered.add_error(f"request {number}", "Traceback: the same", [f"id-{number}"] * 20)
    for number in range(3 * MOST_ERRORS):
        gathered.add_error("other", f"Traceback: {number}")
    report = gathered.take()
    assert report is not None
    assert len(report["errors"]) == MOST_ERRORS
    ids = report["errors"][0].pop("request_ids")
    assert report["errors"][0] == {
        "message": "request 4",
        "traceback": "Traceback: the same",
        "count": 5,
    }
    assert ids == ["id-2"] * 10 + ["id-3"] * 20 + ["id-4"] * 20
    assert gathered.take() is None


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b\n", "\n", "long" * LONGEST, "c\r\n"]), max_size=4).map(
            "".join
        ),
        max_size=40,
    )
)
def test_lines_are_those_that_were_printed_and_never_too_many(pieces: list[str]) -> None:
    gathered = ReportBuffer()
    for piece in pieces:
        gathered.add_output("stdout", piece)
    report = gathered.take() or {"lines": [], "lost": 0}
    whole = "".join(pieces).split("\n")[:-1]
    assert len(report["lines"]) == min(MOST, len(whole))
    assert report["lost"] == len(whole) - len(report["lines"])
    for (_, _, text, _), printed in zip(report["lines"], whole[-MOST:], strict=False):
        assert len(text) <= LONGEST
        assert printed.rstrip("\r").startswith(text[:10]) or len(printed) > LONGEST
