"""Forms of a model in a benchmark, with real workers and servers, and the written record."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.benchmarked import results
from tsx_archiver import ArchiveSpec, inspect_archive, open_archive, write_archive
from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.bench.load.results import read_results
from tsx_cli.bench.report.write_back import write
from tsx_cli.optimize.builder import BuiltForm
from tsx_cli.optimize.write_back import keep_forms
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="workers that are programs need Linux or macOS"
)

DIGITS = Path(__file__).parents[4] / "examples" / "digits"
SUPPORTED_FORM = FormRecord("channels-last", {"device": "cpu", "machine": platform.machine()})
UNSUPPORTED_FORM = FormRecord("onnx", {"device": "cpu", "machine": "pdp11"})
ONE_CONFIGURATION = ("--workers", "1", "--batch-sizes", "1", "--connections", "2")
SHORT_LOAD = ("--duration", "0.2s", "--rounds", "1", "--confidence-width", "99%")


def write_archive_with_forms(directory: Path) -> Path:
    """Make an archive with two forms, of which this machine supports the second."""
    (directory / "config.yaml").write_text("threads: 1\n")
    spec = ArchiveSpec(
        "digits",
        str(DIGITS / "handler.py"),
        serialized_file=DIGITS / "digits.pth",
        model_file=DIGITS / "model.py",
        config_file=directory / "config.yaml",
    )
    path = write_archive(spec, directory)
    (directory / "empty").mkdir()
    with open_archive(path, cache=directory / "cache") as archive:
        digest = archive.digest
    keep_forms(
        path,
        digest,
        [BuiltForm(record, directory / "empty") for record in (UNSUPPORTED_FORM, SUPPORTED_FORM)],
        Settings(cache_dir=directory / "cache"),
    )
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_forms_are_measured_and_unsupported_ones_have_a_reason(run: Run, tmp_path: Path) -> None:
    write_archive_with_forms(tmp_path)
    result = run(
        "bench",
        "digits.mar",
        "--input",
        DIGITS / "images",
        *ONE_CONFIGURATION,
        *SHORT_LOAD,
        "-o",
        "out",
    )
    measured = read_results(tmp_path / "out" / "results.json")
    assert measured.baseline == 0, result.err
    by_form = {trial.as_configuration().form: trial for trial in measured.trials}
    assert measured.trials[0] is by_form["reference"]
    assert {form: trial.state for form, trial in by_form.items()} == {
        "reference": "measured",
        "channels-last": "measured",
        "onnx": "predicted",
    }
    assert "it was built for pdp11" in str(by_form["onnx"].reason)
    assert any(
        note.startswith("the form onnx is not measured: onnx: it was built for pdp11")
        for note in measured.notes
    )
    assert {curve.form: bool(curve.points) for curve in measured.curves} == {
        "channels-last": True,
        "onnx": False,
    }
    accuracy = by_form["channels-last"].accuracy
    assert accuracy is not None
    assert accuracy.same


def test_the_winning_form_is_listed_first(tmp_path: Path) -> None:
    path, measured = write_archive_with_forms(tmp_path), results()
    assert measured.winner is not None
    for form, expected in (
        ("channels-last", ("channels-last", "onnx")),
        ("onnx", ("onnx", "channels-last")),
        ("reference", None),
    ):
        measured.trials[measured.winner].configuration["form"] = form
        measured.model.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert form in write(path, measured, Settings(cache_dir=tmp_path / "cache"))
        assert inspect_archive(path).config.forms == expected
