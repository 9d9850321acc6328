"""What `tsx optimize` refuses, and how it says what to do instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.models import make_model
from tsx_cli.common.run_directory import NAME

HANDLER = "def handle(data, context):\n    return [{'length': len(row.get('data') or row.get('body'))} for row in data or []]\n"
RANDOM = "import random\n\ndef handle(data, context):\n    return [{'value': random.random()} for _ in data or []]\n"


@pytest.fixture
def inputs(run: Run) -> Path:
    """A directory of eight rows, in the directory where the command runs."""
    Path("in").mkdir()
    for number in range(40):
        Path("in", f"{number}.txt").write_text("x" * number)
    return Path("in")


def test_the_help_names_its_options_in_parts(run: Run) -> None:
    shown = run("optimize", "--help").out
    assert all(
        part in shown
        for part in ("--max-loss", "--labels", "--keep", "--resume", "Accuracy", "Forms and time")
    )


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ((), "name an archive: tsx optimize model.mar --input DIR"),
        (("gone.mar",), "there is no file 'gone.mar'"),
        (("flow.war",), "'flow.war' is a workflow; name its models one by one"),
        (("m.mar", "--remove", "--rows", "9"), "--remove only removes forms; leave --rows out"),
        (
            ("--resume", "out", "--forms", "onnx"),
            "--resume uses the options of the original run; leave --forms out",
        ),
        (
            ("--resume", "out"),
            "cannot be read (No such file or directory); name the directory of a run of tsx optimize",
        ),
        (("m.mar",), "name typical inputs, since made-up ones prove nothing"),
        (
            ("m.mar", "--input", "in", "--rows", "7"),
            "--input: 7 different inputs are too few; give at least 8",
        ),
        (("m.mar", "--input", "in", "--time-limit", "soon"), "--time-limit: 'soon' is not a time"),
        (("m.mar", "--input", "in", "--batch-sizes", "0"), "--batch-sizes: '0' is not a number"),
        (("m.mar", "--input", "in", "--device", "tpu"), "--device: 'tpu' is not one of cpu, cuda"),
        (
            ("m.mar", "--input", "in", "--max-loss", "topp1>=-1%"),
            "--max-loss: there is no metric 'topp1'; did you mean 'top1'?",
        ),
        (
            ("m.mar", "--input", "in", "--tolerance", "close"),
            "--tolerance: 'close' is not a tolerance",
        ),
        (
            ("m.mar", "--input", "in", "--labels", "gone.json"),
            "gone.json cannot be read: No such file or directory",
        ),
        (("m.mar", "--input", "in", "--metric", "gone.py:f1"), "there is no file 'gone.py'"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_started(
    run: Run, inputs: Path, words: tuple[str, ...], reported: str
) -> None:
    make_model(Path("m.mar"), HANDLER)
    Path("flow.war").touch()
    ended = run("optimize", *words)
    assert ended.code in (1, 2)
    assert reported in ended.err


def test_a_model_whose_requests_join_and_leave_is_refused_with_the_reason(
    run: Run, inputs: Path
) -> None:
    make_model(Path("m.mar"), HANDLER, config="continuousBatching: true\n")
    ended = run("optimize", "m.mar", "--input", "in")
    assert ended.code == 1
    assert "m cannot be optimized: its requests join and leave at any time" in ended.err


@pytest.mark.usefixtures("processes")
def test_a_handler_that_loads_its_model_itself_is_refused_with_what_to_change(
    run: Run, inputs: Path
) -> None:
    make_model(Path("m.mar"), HANDLER)
    ended = run("optimize", "m.mar", "--input", "in", "--max-loss", "exact>=-20%")
    assert ended.code == 1
    assert (
        "loads its model itself: in its initialize, call `self.model = self.in_form(load)`"
        in ended.err
    )


@pytest.mark.usefixtures("processes")
def test_a_model_that_answers_the_same_request_differently_is_refused(
    run: Run, inputs: Path
) -> None:
    make_model(Path("m.mar"), RANDOM)
    ended = run("optimize", "m.mar", "--input", "in", "--max-loss", "exact>=-20%")
    assert ended.code == 1
    assert "answers the same request differently each time" in ended.err


@pytest.mark.usefixtures("processes")
def test_rows_that_are_too_few_for_the_limit_are_said_with_their_number(
    run: Run, inputs: Path
) -> None:
    make_model(Path("m.mar"), HANDLER)
    ended = run("optimize", "m.mar", "--input", "in", "--output", "out")
    assert ended.code == 2
    assert "give at least 797 different inputs in all" in ended.err
    assert not Path("out").exists()
    assert (
        "exact>=-0.5% needs at least 598 held-out rows to be shown with 95 % confidence; there are 30"
        in ended.err
    )


@pytest.mark.parametrize("changed", [{"sha256": "0" * 64}, {"fingerprint": "another"}])
def test_a_run_goes_on_only_with_the_same_archive_on_the_same_machine(
    run: Run, inputs: Path, changed: dict[str, str]
) -> None:
    make_model(Path("m.mar"), HANDLER, config="continuousBatching: true\n")
    run("optimize", "m.mar", "--input", "in", "-o", "out")
    begun = json.loads(Path("out", NAME).read_text())
    Path("out", NAME).write_text(json.dumps(begun | changed) + "\n")
    ended = run("optimize", "--resume", "out")
    assert ended.code == 1
    assert (
        "has changed since that run started" in ended.err
        or "started on another machine" in ended.err
    )
