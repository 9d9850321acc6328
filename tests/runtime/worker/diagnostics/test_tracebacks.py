"""Tracebacks, which quote only the model's files, even if names or links lead elsewhere."""

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
    directory = tmp_path / "linked"
    directory.mkdir()
    (directory / "helper.py").symlink_to(tmp_path / "secret")
    (directory / "handler.py").write_text("import helper  # the handler's own line\n")
    worker = start_worker(model_dir=str(directory))
    assert not worker.loaded
    assert "is not valid Python" in worker.report["message"]
    assert "the handler's own line" in worker.report["traceback"]
    assert 'helper.py", line 1\n' in worker.report["traceback"]
    assert "the-secret-word" not in str(worker.report) + str(worker.reports)


def test_an_error_of_a_request_quotes_only_the_handlers_lines(
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
    assert worker.ask_statuses(b"") == [500]
    worker.sock.shutdown(1)
    while worker.receive() is not None:
        pass
    [trace] = {error["traceback"] for report in worker.reports for error in report["errors"]}
    assert f'File "{outside}", line 2, in fall\n' in trace
    assert "outside.fall()  # the handler's own line" in trace
    assert "the-secret-word" not in trace


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the directory of a model whose files are quoted."""
    modules = OwnModules()
    modules.root = tmp_path / "model"
    modules.root.mkdir()
    monkeypatch.setattr("tsx_runtime.worker.diagnostics.tracebacks.own_modules", modules)
    (modules.root / "handler.py").write_text("x = = 1\n")
    return modules.root


def test_the_log_quotes_no_file_outside_the_model(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (root / "link.py").symlink_to(tmp_path / "secret")

    def texts_of(file: str) -> list[str]:
        """Return the traceback of a file that does not compile, in each format."""
        with pytest.raises(SyntaxError) as exc_info:
            compile((root / file).read_text(), str(root / file), "exec")
        try:
            raise RuntimeError("why") from exc_info.value
        except RuntimeError as error:
            info = (type(error), error, error.__traceback__)
            record = logging.LogRecord("tsx.worker", logging.ERROR, "", 1, "it failed", (), info)
            formatters = WorkerTextFormatter(), WorkerJsonFormatter()
            return [format_error(error), *(formatter.format(record) for formatter in formatters)]

    secret, code = texts_of("link.py"), texts_of("handler.py")
    assert not any("the-secret-word" in text for text in secret)
    assert all("x = = 1" in text for text in code)
    # This test is not a file of the model.
    assert not any("caught.value" in text for text in secret + code)


def test_frames_of_the_import_system_do_not_count_as_the_models(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker runs in the model's directory, where a relative name seems to be the model's file.
    monkeypatch.chdir(root)
    with pytest.raises(SyntaxError) as exc_info:
        SourceFileLoader("handler", str(root / "handler.py")).exec_module(ModuleType("handler"))
    assert outline(exc_info.value) == "SyntaxError: invalid syntax\n  handler.py:1: x = = 1"
