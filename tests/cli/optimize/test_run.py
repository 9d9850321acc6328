"""Complete runs with real workers and real forms of the digits model.

The model sleeps, and its forms do not.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.cli.conftest import Run
from tests.support import forked
from tests.support.servers import clean
from tsx_archiver import ArchiveSpec, open_archive, write_archive
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.search.worker import items_of, start_worker, worker_spec
from tsx_cli.optimize.builder import FormBuilder
from tsx_cli.optimize.results import OptimizeResults

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
TIMEOUT_S = 240.0
SLEEP_STATEMENT = "        torch.compiler.is_exporting() or __import__('time').sleep(0.02)\n"
QUICK = ("--batch-sizes", "2", "--max-loss", "top1>=-5%")
# A quarter of the rows calibrates; proving a loss below five percent takes 59 of the others.
ROWS = 96


def write_model(directory: Path, name: str, statement: str) -> None:
    """Write an archive of the digits model with an additional statement in its forward method."""
    line = "        return self.classify"
    model = directory / f"{name}.py"
    model.write_text((DIGITS / "model.py").read_text().replace(line, f"{statement}{line}"))
    weights = DIGITS / "digits.pth"
    spec = ArchiveSpec(name, str(DIGITS / "handler.py"), model_file=model, serialized_file=weights)
    write_archive(spec, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make digits.mar, the images in `in`, and labels.json."""
    directory = tmp_path_factory.mktemp("optimize")
    write_model(directory, "digits", SLEEP_STATEMENT)
    (directory / "in").mkdir()
    for number, image in enumerate(images(ROWS)):
        (directory / "in" / f"{number}.png").write_bytes(image)
    labels = {
        f"{number}.png": str(label) for number, label in enumerate(load_digits().target[:ROWS])
    }
    (directory / "labels.json").write_text(json.dumps(labels))
    return directory


def images(count: int) -> list[bytes]:
    files = []
    for pixels in load_digits().images[:count]:
        file = BytesIO()
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(file, "PNG")
        files.append(file.getvalue())
    return files


@pytest.fixture
def optimize(directory: Path, run: Run, processes: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return `tsx optimize` in `directory`, with short measurements."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr("tsx_cli.optimize.run.MEASUREMENT_S", 0.2)
    return partial(run, "optimize")


def only_onnx(self: FormBuilder, seconds: float) -> tuple[dict[str, str | None], dict[str, str]]:
    """Replace the survey of forms, whose process would import a compiler."""
    return {"onnx": None}, {"onnx": "ONNX Runtime"}


def test_an_interrupted_run_resumes_and_a_worker_runs_its_best_form(
    directory: Path, optimize: Run
) -> None:
    arguments = "optimize digits.mar --input in --labels labels.json --forms onnx -o out"
    command = [sys.executable, "-m", "tsx_cli", *arguments.split(), *QUICK]
    process = forked.Popen(
        command,
        cwd=directory,
        env=clean({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("72 held-out rows" in line for line in process.stderr)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert "The run was interrupted" in output
    assert not OptimizeResults.model_validate_json(
        (directory / "out" / "results.json").read_text()
    ).complete

    result = optimize("--resume", "out", "--json")
    assert result.code == 0, result.err
    results = OptimizeResults.model_validate_json(result.out)
    (onnx,) = results.forms
    assert (results.complete, results.best, onnx.state) == (True, "onnx", "kept")
    assert (results.calibration_rows, results.held_out_rows) == (24, 72)
    assert onnx.batches_agree
    assert onnx.guard is not None
    assert onnx.guard.passed
    assert 0.9 < onnx.guard.value <= 1
    (size,) = onnx.sizes
    assert size.reference_ms > 20 > size.median_ms
    assert 1 < size.low <= size.ratio <= size.high
    assert all(
        value is not None and value > 0
        for value in (onnx.build_seconds, onnx.load_seconds, onnx.memory_mib, onnx.size_mib)
    )
    assert results.why.startswith("onnx is ")
    second_result = optimize("--resume", "out", "--keep", "none", "--json")
    assert OptimizeResults.model_validate_json(second_result.out).forms == [
        onnx.model_copy(update={"state": "passed"})
    ], "nothing is tried twice"

    with (
        open_archive(directory / "digits.mar") as archive,
        start_worker(worker_spec(archive, Configuration(), 4)) as worker,
    ):
        assert worker.form == "onnx"
        answers = worker.answer(
            items_of([Payload(body, "image/png") for body in images(3)])
        ).answers
    assert [
        max(scores, key=scores.get) for scores in (json.loads(answer.body) for answer in answers)
    ] == ["0", "1", "2"]
    assert "no forms any more" in optimize("digits.mar", "--remove").out


def test_a_fast_form_that_misses_the_limit_is_not_kept(
    directory: Path, optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    original_bytes = (directory / "digits.mar").read_bytes()
    arguments = "digits.mar --input in --batch-sizes 2 --tolerance exact -o exact"
    result = optimize(*arguments.split())
    assert result.code == 0, result.err
    results = OptimizeResults.model_validate_json(
        (directory / "exact" / "results.json").read_text()
    )
    (form,) = results.forms
    assert (form.state, results.best) == ("inaccurate", None)
    assert form.reason in result.out
    assert form.speedup_low is not None
    assert form.speedup_low > 1
    assert "The reference stays: no form is accurate enough." in result.out
    assert (directory / "digits.mar").read_bytes() == original_bytes


def test_forms_beyond_the_time_limit_are_reported_as_not_tried(
    optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    arguments = "digits.mar --input in --max-loss cosine>=0.5 --time-limit 0.1s -o short"
    result = optimize(*arguments.split())
    assert result.code == 1
    assert "onnx: not tried: the time limit ended" in result.out
    assert "One form was not tried" in result.err
    assert "tsx optimize --resume short" in result.err


def test_a_failing_reference_ends_the_run_without_blaming_a_form(
    directory: Path, optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    crash_statement = (
        "        torch.compiler.is_exporting() or len(images) != 6 or __import__('os')._exit(3)\n"
    )
    write_model(directory, "dying", crash_statement)
    arguments = "dying.mar --input in --batch-sizes 6 --max-loss cosine>=0.5 -o died"
    result = optimize(*arguments.split())
    assert result.code == 1
    assert "the model as it is failed" in result.err
    assert "the worker ended (exit code 3)" in result.err
    results = OptimizeResults.model_validate_json((directory / "died" / "results.json").read_text())
    assert (results.complete, [form.state for form in results.forms]) == (False, ["not tried"])
    assert (directory / "died" / "report.html").is_file()
