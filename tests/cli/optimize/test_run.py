"""Whole runs: real workers and real forms of the digits model, whose own way of running it has a
wait that no graph has.
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
PATIENCE = 240.0
WAIT = "        torch.compiler.is_exporting() or __import__('time').sleep(0.02)\n"
QUICK = ("--batch-sizes", "2", "--max-loss", "top1>=-5%")
ROWS = (
    96  # a quarter for calibration; to show a loss of less than five percent takes 59 of the rest
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """digits.mar, and `in`, which has the images, with labels.json."""
    directory = tmp_path_factory.mktemp("optimize")
    model = (
        (DIGITS / "model.py")
        .read_text()
        .replace("        return self.classify", f"{WAIT}        return self.classify")
    )
    (directory / "model.py").write_text(model)
    spec = ArchiveSpec(
        "digits",
        str(DIGITS / "handler.py"),
        model_file=directory / "model.py",
        serialized_file=DIGITS / "digits.pth",
    )
    write_archive(spec, directory)
    (directory / "in").mkdir()
    for at, image in enumerate(images(ROWS)):
        (directory / "in" / f"{at}.png").write_bytes(image)
    labels = {f"{at}.png": str(label) for at, label in enumerate(load_digits().target[:ROWS])}
    (directory / "labels.json").write_text(json.dumps(labels))
    return directory


def images(count: int) -> list[bytes]:
    found = []
    for pixels in load_digits().images[:count]:
        file = BytesIO()
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(file, "PNG")
        found.append(file.getvalue())
    return found


@pytest.fixture
def optimize(place: Path, run: Run, processes: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`tsx optimize` in `place`, with short measurements."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("tsx_cli.optimize.run.MEASURE", 0.2)
    return partial(run, "optimize")


def only_onnx(self: FormBuilder, seconds: float) -> tuple[dict[str, str | None], dict[str, str]]:
    """In the place of a survey, whose process imports a compiler: the interrupted run has one."""
    return {"onnx": None}, {"onnx": "ONNX Runtime"}


def test_an_interrupted_run_goes_on_and_the_form_that_it_finds_is_what_a_worker_then_runs(
    place: Path, optimize: Run
) -> None:
    words = [
        "optimize",
        "digits.mar",
        "--input",
        "in",
        "--labels",
        "labels.json",
        "--forms",
        "onnx",
        *QUICK,
        "-o",
        "out",
    ]
    command = [sys.executable, "-m", "tsx_cli", *words]
    begun = forked.Popen(
        command, cwd=place, env=clean({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert begun.stderr is not None
        assert any("72 held-out rows" in line for line in begun.stderr)
        started = psutil.Process(begun.pid).children(recursive=True)
        assert started
        begun.send_signal(signal.SIGINT)
        shown, errors = begun.communicate(timeout=PATIENCE)
    finally:
        begun.kill()
    assert begun.returncode == 130, errors
    assert not psutil.wait_procs(started, timeout=30)[1]
    assert "The run was interrupted" in shown
    assert not OptimizeResults.model_validate_json(
        (place / "out" / "results.json").read_text()
    ).complete

    ended = optimize("--resume", "out", "--json")
    assert ended.code == 0, ended.err
    results = OptimizeResults.model_validate_json(ended.out)
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
    again = optimize("--resume", "out", "--keep", "none", "--json")
    assert OptimizeResults.model_validate_json(again.out).forms == [
        onnx.model_copy(update={"state": "passed"})
    ], "nothing is tried twice"

    with (
        open_archive(place / "digits.mar") as archive,
        start_worker(worker_spec(archive, Configuration(), 4)) as worker,
    ):
        assert worker.form == "onnx"
        answers = worker.answer(
            items_of([Payload(body, "image/png") for body in images(3)])
        ).answers
    assert [
        max(scores, key=scores.get) for scores in (json.loads(each.body) for each in answers)
    ] == ["0", "1", "2"]
    assert "no forms any more" in optimize("digits.mar", "--remove").out


def test_a_form_that_does_not_keep_the_bound_is_not_kept_however_fast_it_is(
    place: Path, optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    before = (place / "digits.mar").read_bytes()
    ended = optimize(
        "digits.mar", "--input", "in", "--batch-sizes", "2", "--tolerance", "exact", "-o", "exact"
    )
    assert ended.code == 0, ended.err
    results = OptimizeResults.model_validate_json((place / "exact" / "results.json").read_text())
    (form,) = results.forms
    assert (form.state, results.best) == ("inaccurate", None)
    assert form.reason in ended.out
    assert form.speedup_low is not None
    assert form.speedup_low > 1
    assert "The reference stays: no form is accurate enough." in ended.out
    assert (place / "digits.mar").read_bytes() == before


def test_what_the_time_limit_leaves_no_time_for_is_reported_and_the_run_can_go_on(
    optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    ended = optimize(
        "digits.mar",
        "--input",
        "in",
        "--max-loss",
        "cosine>=0.5",
        "--time-limit",
        "0.1s",
        "-o",
        "short",
    )
    assert ended.code == 1
    assert "onnx: not tried: the time limit ended before it was built" in ended.out
    assert (
        "One form was not tried, as the time limit ended; --resume with a longer --time-limit continues"
        in ended.err
    )
    assert "tsx optimize --resume short" in ended.err


def test_a_reference_that_fails_beside_a_form_ends_the_run_and_the_form_is_not_blamed(
    place: Path, optimize: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormBuilder, "survey", only_onnx)
    dies = (
        "        torch.compiler.is_exporting() or len(images) != 6 or __import__('os')._exit(3)\n"
    )
    model = place / "dying.py"
    model.write_text(
        (DIGITS / "model.py")
        .read_text()
        .replace("        return self.classify", f"{dies}        return self.classify")
    )
    write_archive(
        ArchiveSpec(
            "dying",
            str(DIGITS / "handler.py"),
            model_file=model,
            serialized_file=DIGITS / "digits.pth",
        ),
        place,
    )
    ended = optimize(
        "dying.mar",
        "--input",
        "in",
        "--batch-sizes",
        "6",
        "--max-loss",
        "cosine>=0.5",
        "-o",
        "died",
    )
    assert ended.code == 1
    assert (
        "the model as it is failed, which ended the run: the worker ended (exit code 3)"
        in ended.err
    )
    results = OptimizeResults.model_validate_json((place / "died" / "results.json").read_text())
    assert (results.complete, [form.state for form in results.forms]) == (False, ["not tried"])
    assert (place / "died" / "report.html").is_file()
