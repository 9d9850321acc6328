"""What tracebacks quote: the model's own files, whatever name or link leads elsewhere."""

from __future__ import annotations

import logging
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.runtime.worker.conftest import StartWorker
from tsx_runtime.worker.diagnostics.printing import WorkerJsonFormatter, WorkerTextFormatter
from tsx_runtime.worker.diagnostics.tracebacks import format_error, outline
from tsx_runtime.worker.handler_api.modules import OwnModules

SECRET = "root:the-secret-word:1:0:\n"


def test_an_import_error_quotes_no_file_outside_the_model(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    place = tmp_path / "linked"
    place.mkdir()
    (place / "helper.py").symlink_to(tmp_path / "secret")
    (place / "handler.py").write_text("import helper  # the handler's own line\n")
    worker = start_worker(model_dir=str(place))
    assert not worker.loaded
    assert "is not valid Python" in worker.report["message"]
    assert "the handler's own line" in worker.report["traceback"]
    assert 'helper.py", line 1\n' in worker.report["traceback"]
    assert "the-secret-word" not in str(worker.report) + str(worker.reports)


def test_an_error_of_a_request_quotes_the_handlers_lines_alone(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("def fall():\n    raise ValueError('bottom')  # the-secret-word\n")
    worker = start_worker(f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        import outside
        def handle(data, context):
            if data is not None:
                outside.fall()  # the handler's own line
    """)
    assert worker.ask(b"")[0].status == 500
    worker.sock.shutdown(1)
    while worker.receive() is not None:
        pass
    [trace] = {error["traceback"] for report in worker.reports for error in report["errors"]}
    assert f'File "{outside}", line 2, in fall\n' in trace
    assert "outside.fall()  # the handler's own line" in trace
    assert "the-secret-word" not in trace


def test_neither_does_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = OwnModules()
    own.root = tmp_path / "model"
    monkeypatch.setattr("tsx_runtime.worker.diagnostics.tracebacks.own_modules", own)
    own.root.mkdir()
    (tmp_path / "secret").write_text(SECRET)
    (own.root / "link.py").symlink_to(tmp_path / "secret")
    (own.root / "own.py").write_text("x = = 1\n")
    shown = []
    for file in ("link.py", "own.py"):
        with pytest.raises(SyntaxError) as caught:
            compile((own.root / file).read_text(), str(own.root / file), "exec")
        try:
            raise RuntimeError("why") from caught.value
        except RuntimeError as error:
            record = logging.LogRecord(
                "tsx.worker",
                logging.ERROR,
                __file__,
                1,
                "it failed",
                (),
                (type(error), error, error.__traceback__),
            )
            shown.append(
                (
                    format_error(error),
                    WorkerTextFormatter().format(record),
                    WorkerJsonFormatter().format(record),
                )
            )
    assert not any("the-secret-word" in text for text in shown[0])
    assert all("x = = 1" in text for text in shown[1])
    assert not any(
        "caught.value" in text for pair in shown for text in pair
    )  # this test is no file of the model's


def test_frames_of_the_import_system_are_not_the_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = OwnModules()
    own.root = tmp_path
    monkeypatch.setattr("tsx_runtime.worker.diagnostics.tracebacks.own_modules", own)
    monkeypatch.chdir(
        tmp_path
    )  # a worker runs in the model's directory, below which a relative name would be
    (tmp_path / "handler.py").write_text("x = = 1\n")
    with pytest.raises(SyntaxError) as caught:
        SourceFileLoader("handler", str(tmp_path / "handler.py")).exec_module(ModuleType("handler"))
    assert outline(caught.value) == "SyntaxError: invalid syntax\n  handler.py:1: x = = 1"
