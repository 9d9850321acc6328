"""`tsx archive --check` with real workers: correct handlers, and the faults that it finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import DIGITS, CommandResult, Run
from tests.support import forked

pytestmark = pytest.mark.usefixtures("processes")


Check = Callable[..., CommandResult]


@pytest.fixture
def check(run: Run, tmp_path: Path) -> Check:
    """Return a function that packs a handler with two samples and checks it."""

    def check(code: str, arguments: str = "") -> CommandResult:
        (tmp_path / "code.py").write_text(code)
        for name, body in (("one.json", "[1]"), ("two.json", "[1, 2]")):
            (tmp_path / name).write_text(body)
        samples = "--sample one.json --sample two.json"
        return run(f"archive --name m --handler code.py --force --check {samples} {arguments}")

    return check


CLASS = "class {}:\n    def handle(self, data, context):\n        return data\n\n"
ROWS = "[row['body'] for row in data or []]"


def test_the_example_passes_in_every_format(run: Run) -> None:
    options = f"--handler {DIGITS}/handler.py --sample {DIGITS}/images --force --check"
    for model in (f"digits.pth --model-file {DIGITS}/model.py", "digits.pt"):
        result = run(f"archive {DIGITS}/{model} {options}")
        assert result.code == 0, result.err + result.out
        assert "10 samples got the same answers" in result.out
    second_result = run("archive --check digits.mar --json")
    assert second_result.code == 0
    (report,) = json.loads(second_result.out)
    assert (report["name"], report["check"]["batch_sizes"]) == ("digits", [1, 10])
    assert len(report["check"]["samples"]) == 10


def test_the_files_of_tsx_init_pass_unchanged(run: Run, tmp_path: Path) -> None:
    assert run("init my-model --handler").code == 0
    directory = tmp_path / "my-model"
    assert forked.run([sys.executable, "model.py"], cwd=directory, timeout=60).returncode == 0
    readme = (directory / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith("    tsx archive"))
    arguments = line.split()[1:]
    paths = [
        str(directory / argument) if (directory / argument).exists() else argument
        for argument in arguments
    ]
    result = run(*paths)
    assert result.code == 0, result.err + result.out
    assert "2 samples got the same answers" in result.out


def test_a_given_sample_replaces_those_of_the_archive(
    run: Run, check: Check, tmp_path: Path
) -> None:
    assert check(f"def handle(data, context):\n    return {ROWS}\n").code == 0
    (tmp_path / "other.json").write_text("[7]")
    result = run("archive --check m.mar --sample other.json --json")
    (report,) = json.loads(result.out)
    assert report["check"]["samples"] == ["other.json"]


def test_a_check_without_samples_has_its_own_exit_code(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def handle(data, context):\n    return data\n")
    result = run("archive --name m --handler code.py --check")
    assert result.code == 3
    assert "check: m 1.0 loaded in " in result.out
    assert "there is no sample to send" in result.out


def test_the_error_of_a_missing_sample_names_it(run: Run) -> None:
    result = run(f"archive --no-import {DIGITS}/digits.pt --sample none.png")
    assert (result.code, "there is no sample 'none.png'" in result.err) == (2, True)


WRONG = {
    "answers change places": (
        f"def handle(data, context):\n    return {ROWS}[::-1]\n",
        "in a batch, its answer was the answer to",
    ),
    "answers depend on the batch": (
        "def handle(data, context):\n    return data and [len(data)] * len(data)\n",
        "the answer: 1 (alone), 2 (in a batch)",
    ),
    "the type depends on the batch": (
        "def handle(data, context):\n    return [1] if data and len(data) == 1 else [1.0] * len(data or [])\n",
        "the answer: 1 (alone), 1.0 (in a batch)",
    ),
    "two answers to one input differ": (
        "import random\n\ndef handle(data, context):\n    return [random.random() for _ in data or []]\n",
        "one.json: two answers to the same request, sent alone, differ",
    ),
    "the count is wrong in a batch": (
        "def handle(data, context):\n    return [1]\n",
        "200 (alone), 500 (in a batch); number of batch response mismatched, expect: 2, got: 1. Handler",
    ),
    "the answer cannot be sent": (
        "def handle(data, context):\n    return [object()] * len(data or [])\n",
        "answered 500 when sent alone: Unsupported model output data type",
    ),
    "the handler raises": (
        "def handle(data, context):\n    return [1 / 0 for _ in data or []]\n",
        "answered 500 when sent alone: Prediction failed: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_faulty_handler_fails_the_check(check: Check, fault: str) -> None:
    code, reason = WRONG[fault]
    result = check(code)
    assert result.code == 1
    assert "check: FAILED " in result.out
    assert reason in result.out


def test_the_tolerance_decides_which_differences_count(check: Check) -> None:
    code = "def handle(data, context):\n    return data and [1 + len(data) / 1000] * len(data)\n"
    assert check(code).code == 1
    assert check(code, "--tolerance 0.01").code == 0


UNLOADABLE = {
    "does not import": ("import no_such_library\n", "No module named 'no_such_library'"),
    "is no Python": ("def handle(\n", "is not valid Python"),
    "has neither a function nor a class": ("x = 1\n", "code.py"),
    "has two classes": (CLASS.format("One") + CLASS.format("Two"), "code.py"),
    "ends its process": ("import os\nos._exit(7)\n", "7"),
}


@pytest.mark.parametrize("fault", UNLOADABLE)
def test_a_loading_error_of_a_handler_is_reported(check: Check, fault: str) -> None:
    code, reason = UNLOADABLE[fault]
    result = check(code)
    assert result.code == 1
    assert result.err.startswith(
        ("Error: m.mar does not load: ", "Error: code.py is not valid Python, line 1: ")
    )
    assert reason in result.err
    assert "This is a bug in tsx" not in result.err
