"""What is kept of a version's errors and output: bounded, the newest errors first, the same one counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.telemetry.error_log import KEPT_ERRORS, KEPT_LINES, LONGEST, ErrorLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_the_newest_comes_first_and_the_same_again_is_counted() -> None:
    kept = ErrorLog(Clock())
    kept.add_error("request 1 failed", "Traceback\nValueError: a")
    kept.add_error("request 2 failed", "Traceback\nValueError: a", count=3)
    kept.add_error("worker 9000 ended")
    assert [(error.at, error.times, error.message) for error in kept.errors] == [
        (3.0, 1, "worker 9000 ended"),
        (2.0, 4, "request 2 failed"),
    ]
    assert kept.total == 5


def test_messages_without_a_traceback_are_keptapart() -> None:
    kept = ErrorLog(Clock())
    kept.add_error("worker 9000 ended")
    kept.add_error("worker 9001 ended")
    kept.add_error("worker 9001 ended")
    assert [(error.message, error.times) for error in kept.errors] == [("worker 9001 ended", 2), ("worker 9000 ended", 1)]


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3 * KEPT_ERRORS))
def test_what_is_kept_is_bounded_and_nothing_is_lost_of_the_count(reported: list[tuple[str, str]]) -> None:
    kept = ErrorLog(Clock())
    for message, trace in reported:
        kept.add_error(message, trace)
    assert len(kept.errors) <= KEPT_ERRORS
    assert kept.total == len(reported)
    assert sum(error.times for error in kept.errors) <= len(reported)


def test_of_a_long_traceback_both_ends_stay() -> None:
    kept = ErrorLog(Clock())
    kept.add_error("deep", "begin" + "x" * 5 * LONGEST + "end")
    (error,) = kept.errors
    assert len(error.traceback) < 1.1 * LONGEST
    assert error.traceback.startswith("begin")
    assert error.traceback.endswith("end")


def test_lines_have_numbers_and_only_the_newest_are_kept() -> None:
    kept = ErrorLog(Clock())
    for start in range(0, KEPT_LINES + 200, 100):
        lines = [[1.0, "stdout", f"line {number}", []] for number in range(start, start + 100)]
        kept.add_report("9000", {"errors": [], "lost": 0, "lines": lines})
    assert len(kept.lines) == KEPT_LINES
    assert (kept.lines[-1].number, kept.lines[-1].text) == (KEPT_LINES + 200, f"line {KEPT_LINES + 199}")


def test_a_report_says_what_it_left_out() -> None:
    kept = ErrorLog(Clock())
    error = {"message": "failed", "traceback": "Traceback", "count": 2}
    kept.add_report("9000", {"errors": [error], "lost": 7, "lines": [[5.0, "stderr", "last", ["id-1"]]]})
    assert [(line.worker, line.text) for line in kept.lines] == [("9000", "[7 lines omitted]"), ("9000", "last")]
    assert [line.request_ids for line in kept.lines] == [[], ["id-1"]]
    assert (kept.total, kept.errors[0].times) == (2, 2)
