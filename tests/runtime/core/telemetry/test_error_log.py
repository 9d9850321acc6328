"""The bounded log of a version's errors and output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.telemetry.error_log import (
    MAX_ERRORS,
    MAX_ERRORS_OF_KIND,
    MAX_ID_CHARS,
    MAX_LINES,
    MAX_REQUEST_IDS,
    MAX_TEXT_CHARS,
    ErrorLog,
    kind_of,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_the_newest_error_is_first_and_repetitions_are_counted() -> None:
    log = ErrorLog(Clock())
    log.add_error("request 1 failed", "Traceback\nValueError: a")
    log.add_error("request 2 failed", "Traceback\nValueError: a", count=3)
    log.add_error("worker 9000 ended")
    log.add_error("request 3 failed", "Traceback\nValueError: a")
    assert [(error.at, error.first, error.times, error.message) for error in log.errors] == [
        (4.0, 1.0, 5, "request 3 failed"),
        (3.0, 3.0, 1, "worker 9000 ended"),
    ]
    assert log.total == 6


def test_errors_that_differ_only_in_their_message_are_grouped() -> None:
    log = ErrorLog(Clock())
    log.add_error("failed", "Traceback\n  File a, line 3\nKeyError: 'id'")
    for number in range(3 * MAX_ERRORS):
        log.add_error("failed", f"Traceback\n  File a, line 7\nValueError: row {number}: bad")
    *repeated_errors, single_error = log.errors
    assert len(repeated_errors) == MAX_ERRORS_OF_KIND
    assert repeated_errors[0].traceback.endswith(f"row {3 * MAX_ERRORS - 1}: bad")
    assert {log.kinds[error.kind] for error in repeated_errors} == {(3 * MAX_ERRORS, 2.0)}
    assert (single_error.times, log.kinds[single_error.kind]) == (1, (1, 1.0))
    assert log.kinds.keys() == {error.kind for error in log.errors}


def test_errors_are_grouped_by_exception_and_location() -> None:
    frames = "Traceback\n  File a, line 7\n    row[key]\n"
    assert kind_of("a", f"{frames}KeyError: 1") == kind_of("b", f"{frames}KeyError: 2: 3\n")
    assert kind_of("a", f"{frames}RuntimeError: of\n\tmany lines: 1") == kind_of(
        "a", f"{frames}RuntimeError: of\n\tother lines"
    )
    assert kind_of("a", f"{frames}KeyError: 1") != kind_of("a", f"{frames}IndexError: 1")
    assert kind_of("a", f"{frames}KeyError: 1") != kind_of(
        "a", frames.replace("7", "8") + "KeyError: 1"
    )
    assert kind_of("worker 1 ended", "") != kind_of("worker 2 ended", "")


def test_an_error_lists_its_newest_requests() -> None:
    log = ErrorLog(Clock())
    error = {"message": "failed", "traceback": "Traceback", "count": 1}
    for number in range(MAX_REQUEST_IDS + 5):
        log.add_report(
            "9000",
            {
                "errors": [error | {"request_ids": [f"id-{number}", "x" * 2 * MAX_ID_CHARS]}],
                "lost": 0,
                "lines": [],
            },
        )
    (record,) = log.errors
    assert len(record.request_ids) == MAX_REQUEST_IDS
    assert record.request_ids[-2:] == (f"id-{MAX_REQUEST_IDS + 4}", "x" * MAX_ID_CHARS)


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3 * MAX_ERRORS))
def test_the_log_is_bounded_but_counts_every_error(reported_errors: list[tuple[str, str]]) -> None:
    log = ErrorLog(Clock())
    for message, trace in reported_errors:
        log.add_error(message, trace)
    assert len(log.errors) <= MAX_ERRORS
    assert log.total == len(reported_errors)
    assert sum(error.times for error in log.errors) <= len(reported_errors)
    assert log.kinds.keys() == {error.kind for error in log.errors}
    assert sum(kind.times for kind in log.kinds.values()) <= len(reported_errors)


def test_a_long_traceback_keeps_its_beginning_and_end() -> None:
    log = ErrorLog(Clock())
    log.add_error("deep", "begin" + "x" * 5 * MAX_TEXT_CHARS + "end")
    (error,) = log.errors
    assert len(error.traceback) < 1.1 * MAX_TEXT_CHARS
    assert error.traceback.startswith("begin")
    assert error.traceback.endswith("end")


def test_lines_are_numbered_and_only_the_newest_are_kept() -> None:
    log = ErrorLog(Clock())
    for start in range(0, MAX_LINES + 200, 100):
        lines = [[1.0, "stdout", f"line {number}", []] for number in range(start, start + 100)]
        log.add_report("9000", {"errors": [], "lost": 0, "lines": lines})
    assert len(log.lines) == MAX_LINES
    assert (log.lines[-1].number, log.lines[-1].text) == (
        MAX_LINES + 200,
        f"line {MAX_LINES + 199}",
    )


def test_a_report_says_how_much_it_omitted() -> None:
    log = ErrorLog(Clock())
    error = {"message": "failed", "traceback": "Traceback", "count": 2, "request_ids": []}
    log.add_report(
        "9000", {"errors": [error], "lost": 7, "lines": [[5.0, "stderr", "last", ["id-1"]]]}
    )
    assert [(line.worker, line.text) for line in log.lines] == [
        ("9000", "[7 lines omitted]"),
        ("9000", "last"),
    ]
    assert [line.request_ids for line in log.lines] == [[], ["id-1"]]
    assert (log.total, log.errors[0].times) == (2, 2)
