"""Errors in the log: only the model's lines, each error once, and the number of repeats."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import pytest

from tsx_runtime.worker.diagnostics import failures
from tsx_runtime.worker.diagnostics.failures import RepeatFilter, log_failure
from tsx_runtime.worker.diagnostics.tracebacks import outline
from tsx_runtime.worker.handler_api.modules import OwnModules

HANDLER = """
import json

def deep(count):
    return deep(count - 1) if count else 1 / 0

def parse(body):
    try:
        return json.loads(body)
    except ValueError as error:
        raise KeyError("no number") from error
"""


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    modules = OwnModules()
    modules.root = tmp_path
    monkeypatch.setattr("tsx_runtime.worker.diagnostics.tracebacks.own_modules", modules)
    (tmp_path / "handler.py").write_text(HANDLER)
    spec = importlib.util.spec_from_file_location("outlined_handler", tmp_path / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(call, *arguments) -> BaseException:
    with pytest.raises(Exception) as exc_info:  # noqa: PT011
        call(*arguments)
    return exc_info.value


def test_an_outline_has_the_models_frames_and_the_causes(handler) -> None:
    assert outline(error_of(handler.parse, "x")).splitlines() == [
        "KeyError: 'no number'",
        '  handler.py:11 in parse: raise KeyError("no number") from error',
        "caused by json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "  handler.py:9 in parse: return json.loads(body)",
    ]


def test_repeated_frames_are_counted(handler) -> None:
    line = "  handler.py:5 in deep: return deep(count - 1) if count else 1 / 0"
    text = outline(error_of(handler.deep, 30))
    assert text == f"ZeroDivisionError: division by zero\n{line} (31 times)"


def test_an_error_outside_the_models_files_has_its_innermost_frames(handler) -> None:
    name, *frames = outline(error_of(json.loads, "x")).splitlines()
    assert name.startswith("json.decoder.JSONDecodeError")
    assert len(frames) == 3
    assert frames[-1].startswith("  json/decoder.py:")


def test_an_error_is_logged_once_and_its_repeats_are_counted(handler, caplog) -> None:
    """Count errors of the same type and line as repeats; their texts may differ."""
    now, records = [0.0], []
    repeats = RepeatFilter(lambda record: records.append(record.getMessage()), clock=lambda: now[0])

    def fail(number: int, error: BaseException) -> bool:
        log_failure([f"id-{number}"], error)
        return repeats.hold(caplog.records[-1])

    assert not fail(0, error_of(handler.deep, 3))
    assert not fail(0, error_of(handler.parse, "x"))
    assert all(fail(number, error_of(handler.parse, "y" * number)) for number in range(1, 21))
    repeats.flush()
    ids = ", ".join(f"id-{number}" for number in range(1, failures.MAX_NAMED_REQUESTS + 1))
    assert records == [
        f"the same failure 20 times more, for the requests {ids} and 12 more: KeyError: 'no number'"
        " (handler.py:9 in parse)"
    ]
    now[0] = failures.REPEATS_INTERVAL_S - 1
    assert fail(21, error_of(handler.parse, "x"))
    repeats.flush()
    now[0] = 3 * failures.REPEATS_INTERVAL_S
    # After a while the error is logged again.
    assert not fail(22, error_of(handler.parse, "x"))
    repeats.flush()
    assert len(records) == 2


def test_a_line_that_a_handler_logs_is_never_suppressed(handler) -> None:
    error = error_of(handler.deep, 1)
    record = logging.LogRecord(
        "own", logging.ERROR, "", 0, "again", (), (type(error), error, error.__traceback__)
    )
    repeats = RepeatFilter(lambda record: None)
    assert not any(repeats.hold(record) for _ in range(3))


def test_a_process_that_a_handler_forked_reports_no_repeats(handler, caplog, monkeypatch) -> None:
    records: list[logging.LogRecord] = []
    repeats = RepeatFilter(records.append, clock=lambda: 0.0)
    error = error_of(handler.deep, 1)
    for _ in range(2):
        log_failure(["id"], error)
        repeats.hold(caplog.records[-1])
    with monkeypatch.context() as forked:
        forked.setattr(failures.os, "getpid", lambda: -1)
        repeats.flush()
    assert not records
    repeats.flush()
    assert len(records) == 1
