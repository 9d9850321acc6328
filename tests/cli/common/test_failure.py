"""Errors of commands on stderr while a server writes log lines there."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from tsx_cli.common.failure import CliError, report
from tsx_runtime.errors import LoadFailed
from tsx_runtime.targets import entry


class WriteRecorder(io.RawIOBase):
    """A stderr that records each write of the process."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.writes.append(bytes(data).decode())
        return len(data)


LOAD_FAILED = LoadFailed("no\nworker", traceback="line 1\nline 2")


def report_error() -> None:
    report(CliError("2 files cannot be served:\na.mar\nb.mar"), debug=False, file=sys.stderr)


def report_bug() -> None:
    report(ValueError("first\nsecond"), debug=False, file=sys.stderr)


def report_traceback() -> None:
    report(LOAD_FAILED, debug=True, file=sys.stderr)


def report_container() -> None:
    entry.main(["serve"], {})


@pytest.mark.parametrize(
    "print_error", [report_error, report_bug, report_traceback, report_container]
)
def test_log_lines_never_interrupt_the_text_of_an_error(
    print_error: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise LOAD_FAILED

    monkeypatch.setattr(entry, "_serve", fail)
    recorder = WriteRecorder()
    stderr = io.TextIOWrapper(io.BufferedWriter(recorder), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stderr)
    print_error()
    stderr.flush()
    assert recorder.writes
    assert [text for text in recorder.writes if not text.endswith("\n")] == []
