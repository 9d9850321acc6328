"""Options and runs that `tsx optimize` refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.models import make_model
from tsx_cli.common.run_directory import NAME

HANDLER = "def handle(data, context):\n    return [{'length': len(row.get('data') or row.get('body'))} for row in data or []]\n"
RANDOM = "import random\n\ndef handle(data, context):\n    return [{'value': random.random()} for _ in data or []]\n"
CONTINUOUS = "continuousBatching: true\n"


@pytest.fixture
def inputs(run: Run) -> Path:
    """Make a directory of forty rows in the current one."""
    Path("in").mkdir()
    for number in range(40):
        Path("in", f"{number}.txt").write_text("x" * number)
    return Path("in")


def test_the_help_groups_its_options(run: Run) -> None:
    help_text = run("optimize", "--help").out
    assert all(
        part in help_text
        for part in ("--max-loss", "--labels", "--keep", "--resume", "Accuracy", "Forms and time")
    )


WITH_INPUT = ("m.mar", "--input", "in")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name an archive: tsx optimize model.mar --input DIR"),
        (("gone.mar",), "there is no file 'gone.mar'"),
        (("flow.war",), "'flow.war' is a workflow"),
        (("m.mar", "--remove", "--rows", "9"), "leave --rows out"),
        (("--resume", "out", "--forms", "onnx"), "leave --forms out"),
        (("--resume", "out"), "cannot be read (No such file or directory)"),
        (("m.mar",), "name typical inputs"),
        ((*WITH_INPUT, "--rows", "7"), "--input: 7 different inputs are too few; give at least 8"),
        ((*WITH_INPUT, "--time-limit", "soon"), "--time-limit: 'soon'"),
        ((*WITH_INPUT, "--batch-sizes", "0"), "--batch-sizes: '0'"),
        ((*WITH_INPUT, "--device", "tpu"), "--device: 'tpu' is not one of cpu, cuda"),
        ((*WITH_INPUT, "--max-loss", "topp1>=-1%"), "'topp1'; did you mean 'top1'?"),
        ((*WITH_INPUT, "--tolerance", "close"), "--tolerance: 'close'"),
        ((*WITH_INPUT, "--labels", "gone.json"), "gone.json cannot be read: No such file"),
        ((*WITH_INPUT, "--metric", "gone.py:f1"), "there is no file 'gone.py'"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    run: Run, inputs: Path, arguments: tuple[str, ...], reason: str
) -> None:
    make_model(Path("m.mar"), HANDLER)
    Path("flow.war").touch()
    result = run("optimize", *arguments)
    assert result.code in (1, 2)
    assert reason in result.err


def test_a_model_with_continuous_batching_is_refused(run: Run, inputs: Path) -> None:
    make_model(Path("m.mar"), HANDLER, config=CONTINUOUS)
    result = run("optimize", *WITH_INPUT)
    assert result.code == 1
    assert "its requests join and leave at any time" in result.err


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (HANDLER, "call `self.model = self.in_form(load)`"),
        (RANDOM, "answers the same request differently each time"),
    ],
    ids=["that loads its model itself", "that is random"],
)
def test_a_handler_without_possible_forms_is_refused(
    run: Run, inputs: Path, handler: str, reason: str
) -> None:
    make_model(Path("m.mar"), handler)
    result = run("optimize", *WITH_INPUT, "--max-loss", "exact>=-20%")
    assert result.code == 1
    assert reason in result.err


@pytest.mark.usefixtures("processes")
def test_too_few_rows_are_refused_with_the_required_number(run: Run, inputs: Path) -> None:
    make_model(Path("m.mar"), HANDLER)
    result = run("optimize", *WITH_INPUT, "--output", "out")
    assert result.code == 2
    assert "give at least 797 different inputs in all" in result.err
    assert "exact>=-0.5% needs at least 598 held-out rows" in result.err
    assert "there are 30" in result.err
    assert not Path("out").exists()


def test_a_run_resumes_only_with_the_same_archive_and_machine(run: Run, inputs: Path) -> None:
    make_model(Path("m.mar"), HANDLER, config=CONTINUOUS)
    run("optimize", *WITH_INPUT, "-o", "out")
    journal = json.loads(Path("out", NAME).read_text())
    for change, reason in (
        ({"sha256": "0" * 64}, "has changed since that run started"),
        ({"fingerprint": "another"}, "started on another machine"),
    ):
        Path("out", NAME).write_text(json.dumps(journal | change) + "\n")
        result = run("optimize", "--resume", "out")
        assert result.code == 1
        assert reason in result.err
