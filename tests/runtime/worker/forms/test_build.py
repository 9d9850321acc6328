"""The process that builds forms of an archive's directory."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.conftest import ORDER
from tests.support import forked
from tsx_archiver.metadata.forms import FORMS_FILE, FormIndex, FormRecord
from tsx_runtime import wire
from tsx_runtime.wire import Kind
from tsx_runtime.worker.forms import build
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.loading import load_form

DIGITS = Path(__file__).parents[4] / "examples" / "digits"
SIZES = (1, 2, 3, 4)
POSTPROCESS = """
from handler import DigitClassifier
class Other(DigitClassifier):
    def postprocess(self, data):
        {}
"""


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("handler.py", "model.py", "digits.pth", "index_to_name.json"):
        shutil.copy(DIGITS / name, directory)
    return directory


def batches(workspace: Path) -> Path:
    images = [path.read_bytes() for path in sorted((DIGITS / "images").iterdir())]
    frames = []
    for number, rows in enumerate(SIZES):
        items = [(0, wire.request_meta("id", b"", ()), body) for body in images[:rows]]
        frames.append(b"".join(wire.encode(Kind.BATCH, number, items)))
    path = workspace / "batches"
    path.write_bytes(b"".join(frames))
    return path


def a_build_order(
    model: Path, form: str | None, workspace: Path, handler: str = "handler.py"
) -> dict[str, Any]:
    manifest = {
        "model": {"modelName": "digits", "modelFile": "model.py", "serializedFile": "digits.pth"}
    }
    load = {
        **ORDER,
        "model_dir": str(model),
        "manifest": manifest,
        "handler": handler,
        "model_config": "forms: [reference]",
    }
    directory = workspace / "tsx-forms" / str(form)
    directory.mkdir(parents=True)
    return {
        "load": load,
        "batches": str(batches(workspace)),
        "form": form,
        "directory": str(directory),
        "report": str(workspace / "report.json"),
    }


def run_build(build_order: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Return the exit code, and the report if there is one."""
    process = forked.run(
        [sys.executable, "-m", "tsx_runtime.worker.forms.build"],
        input=json.dumps(build_order),
        text=True,
        capture_output=True,
        timeout=120,
    )
    report = Path(build_order["report"])
    return process.returncode, json.loads(report.read_text()) if report.is_file() else None


@pytest.mark.usefixtures("processes")
def test_a_survey_tells_for_every_form_whether_it_can_be_built(
    digits: Path, tmp_path: Path
) -> None:
    code, report = run_build(a_build_order(digits, None, tmp_path))
    assert code == 0
    assert report is not None
    assert list(report["applies"]) == list(known_forms())
    assert report["applies"]["channels-last"] is None
    assert report["applies"]["torchscript"] is None


@pytest.mark.usefixtures("processes")
def test_a_built_form_is_loaded_and_gives_the_archives_answers(
    digits: Path, tmp_path: Path
) -> None:
    code, report = run_build(a_build_order(digits, "torchscript", tmp_path))
    assert code == 0
    assert report is not None
    record = FormRecord(**report["record"])
    (tmp_path / FORMS_FILE).write_bytes(FormIndex((record,)).content())
    loaded_form = load_form(
        ["torchscript"],
        tmp_path,
        {},
        lambda: pytest.fail("the form is enough"),
        torch.device("cpu"),
    )
    assert loaded_form.name == "torchscript"
    assert loaded_form.model(torch.rand(7, 1, 8, 8)).shape == (7, 10)


@pytest.mark.usefixtures("processes")
def test_a_form_with_different_results_is_not_built(digits: Path, tmp_path: Path) -> None:
    model = (digits / "model.py").read_text()
    sign = "(1 if self.classify.weight.dtype == torch.float32 else -1)"
    (digits / "model.py").write_text(model.replace("return self", f"return {sign} * self"))
    _, report = run_build(a_build_order(digits, "torchscript-bf16", tmp_path))
    assert report is not None
    assert "little in common with the model's" in report["reason"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (
            "def handle(data, context):\n    return data",
            "call `self.model = self.in_form(load)`",
        ),
        (
            POSTPROCESS.format("raise ValueError('no digit')"),
            "does not answer an input: ",
        ),
        ("raise ImportError('no such thing')", "no such thing"),
    ],
    ids=["loads its model itself", "does not answer", "does not load"],
)
def test_the_reason_why_an_archive_can_have_no_forms_is_reported(
    digits: Path, tmp_path: Path, handler: str, reason: str
) -> None:
    (digits / "other.py").write_text(handler)
    code, report = run_build(a_build_order(digits, None, tmp_path, "other.py"))
    assert code == 0
    assert report is not None
    assert reason in report["reason"]


@pytest.mark.usefixtures("processes")
def test_the_crash_of_a_build_leaves_no_report(digits: Path, tmp_path: Path) -> None:
    (digits / "other.py").write_text(POSTPROCESS.format("__import__('os').abort()"))
    code, report = run_build(a_build_order(digits, "torchscript", tmp_path, "other.py"))
    assert code != 0
    assert report is None


def test_an_assertion_without_a_text_is_reported_with_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(order: object) -> None:
        raise AssertionError

    monkeypatch.setattr(build, "run", fails)
    monkeypatch.setattr(
        sys,
        "stdin",
        io.StringIO(json.dumps({"form": "int8-static", "report": str(tmp_path / "report")})),
    )
    build.main()
    reason = json.loads((tmp_path / "report").read_text())["reason"]
    assert reason.startswith("AssertionError in test_build.py, line ")
    assert reason.endswith(": raise AssertionError")
