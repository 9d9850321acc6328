"""The command as a whole: help, completion, and how it ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import typer

from tests.cli.conftest import Run
from tsx_archiver import ArchiveError
from tsx_cli.common.failure import HOW_TO_SEE_ALL, CliError, UsageError, report, where
from tsx_cli.main import Commands, hoist_debug, main, run
from tsx_runtime.errors import LoadFailed
from tsx_runtime.version import __version__

HEAVY = (
    "torch",
    "fastapi",
    "uvicorn",
    "pydantic",
    "numpy",
    "PIL",
    "yaml",
    "jinja2",
    "asyncio",
    "tsx_runtime.settings.schema",
    "tsx_archiver.opening",
)


def python(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return finished.stdout


@pytest.mark.usefixtures("processes")
def test_help_imports_nothing_heavy() -> None:
    reported = python(
        f"import sys; from tsx_cli.main import main; main(['--help']); print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert reported.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("processes")
def test_no_command_imports_for_its_help_what_only_its_run_needs() -> None:
    code = """
import importlib, sys
from tsx_cli.main import Commands
for module, _ in Commands.entries.values():
    importlib.import_module(module)
"""
    needed = (*HEAVY, "tsx_archiver.opening", "tsx_runtime.settings.schema", "tsx_runtime.core")
    assert (
        python(f"{code}print([name for name in {needed} if name in sys.modules])").splitlines()[-1]
        == "[]"
    )


@pytest.mark.usefixtures("processes")
def test_completion_imports_no_command() -> None:
    code = (
        "import sys; from tsx_cli.main import main; main([]); "
        "print([n for n in sys.modules if n in ('tsx_cli.serve.command', 'tsx_cli.archive.command')])"
    )
    reported = python(code, _TSX_COMPLETE="complete_bash", COMP_WORDS="tsx ", COMP_CWORD="1")
    assert reported.split()[: len(Commands.entries)] == list(Commands.entries)
    assert reported.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("serve --management", ["--management-port"]),
        ("archive --ha", ["--handler"]),
        ("archive model.pt --ha", ["--handler"]),
        ("archive --", {"--handler", "--check", "--json", "--help"}),
        ("archive in", ["inspect"]),
        ("models de", ["describe"]),
    ],
)
def test_completion_knows_the_words_of_a_command(line: str, expected: list[str] | set[str]) -> None:
    words = f"tsx {line}"
    environment = {
        "_TSX_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    completed = python("from tsx_cli.main import main; main([])", **environment).split()
    assert completed == expected if isinstance(expected, list) else expected < set(completed)
    assert len(completed) == len(set(completed))


@pytest.mark.usefixtures("processes")
def test_completion_without_a_server_prints_nothing() -> None:
    variables = {
        "_TSX_COMPLETE": "complete_bash",
        "COMP_WORDS": "tsx predict ",
        "COMP_CWORD": "2",
        "TSX_INFERENCE_ADDRESS": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-c", "from tsx_cli.main import main; main([])"]
    ended = subprocess.run(
        command,
        env=os.environ | variables | {"TSX_NO_SETTING": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout.strip(), ended.stderr) == ("", "")


@pytest.mark.usefixtures("processes")
def test_a_completion_script_is_shown() -> None:
    """In a shell, since it is the one that asks whose script it is."""
    words = f"'{sys.executable}' -m tsx_cli --show-completion; exit"
    assert (
        "_COMPLETE"
        in subprocess.run(
            ["bash", "-c", words], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    )


def test_every_command_has_help(run: Run) -> None:
    listed = run("--help").out
    for name in Commands.entries:
        assert name in listed
        ended = run(name, "--help")
        assert ended.code == 0, ended.err
        assert f"Usage: tsx {name}" in ended.out
        assert "bool" not in ended.out  # a flag takes no value


def test_version_is_reported(run: Run) -> None:
    ended = run("--version")
    assert ended.code == 0
    assert ended.out in (f"tsx {__version__} (compiled)\n", f"tsx {__version__} (pure Python)\n")


def test_an_unknown_command_names_the_nearest_one(run: Run) -> None:
    ended = run("serv")
    assert ended.code == 2
    assert "Did you mean 'serve'?" in ended.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rollout", "x"], "'tsx models rollout'"),
        (["replace", "x.mar"], "'tsx models replace'"),
        (["list"], "'tsx models list' or 'tsx jobs list'"),
        (["models", "predict", "x"], "'tsx predict'"),
        (["jobs", "register", "x.mar"], "'tsx models register'"),
    ],
)
def test_a_command_of_another_group_is_named_with_its_group(
    run: Run, words: list[str], line: str
) -> None:
    ended = run(*words)
    assert ended.code == 2
    assert f"Did you mean {line}?" in " ".join(ended.err.replace("│", " ").split())


def test_an_unknown_option_is_wrong_usage(run: Run) -> None:
    assert run("serve", "--prot", "1").code == 2


def reported(error: Exception, *, debug: bool = False) -> tuple[int, str]:
    file = io.StringIO()
    try:
        raise error
    except Exception as raised:
        return report(raised, debug=debug, file=file), file.getvalue()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CliError("it broke"), 1, "Error: it broke\n"),
        (UsageError("not so"), 2, "Error: not so\n"),
        (ArchiveError("bad zip"), 1, "Error: bad zip\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.pt"),
            1,
            "Error: No such file or directory: 'x.pt'\n",
        ),
    ],
)
def test_an_expected_error_is_one_line(error: Exception, code: int, text: str) -> None:
    assert reported(error) == (code, text)


def test_an_unexpected_error_is_two_lines_that_say_how_to_see_more() -> None:
    assert reported(KeyError("x")) == (
        1,
        "Error: KeyError: 'x'\nThis is a bug in tsx; run again with --debug to see the traceback.\n",
    )


@pytest.mark.parametrize("error", [KeyError("x"), CliError("it broke")])
def test_debug_shows_the_traceback(error: Exception) -> None:
    assert "Traceback (most recent call last)" in reported(error, debug=True)[1]


WORKERS_TRACEBACK = """Traceback (most recent call last):
  File "/models/m/handler.py", line 7, in initialize
    self.model = load()
  File "/models/m/weights.py", line 3, in load
    raise ValueError("why")
  File "<frozen importlib._bootstrap>", line 1, in _find
ValueError: why
"""


def test_of_a_workers_traceback_only_the_place_is_reported_unless_debugging() -> None:
    error = LoadFailed("it did not load", traceback=WORKERS_TRACEBACK)
    assert reported(error)[1] == (
        'Error: it did not load\nIt was raised in weights.py, line 3: raise ValueError("why")\n--debug shows the whole traceback.\n'
    )
    assert WORKERS_TRACEBACK in reported(error, debug=True)[1]
    assert where("no frame at all") == ""
    assert (
        where(
            '  File "/lib/loader.py", line 232, in _initialised\nTypeError: a line of ours explains nothing\n'
        )
        == ""
    )


def test_of_a_model_that_does_not_load_all_lines_of_its_own_code_are_reported() -> None:
    error = LoadFailed("it did not load", traceback=WORKERS_TRACEBACK)
    error.outline = "  handler.py:7 in initialize: self.model = load()"
    lines = reported(error.named("m.mar"))[1].splitlines()
    assert lines == ["Error: m.mar does not load: it did not load", error.outline, HOW_TO_SEE_ALL]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serve", "x"], (False, ["serve", "x"])),
        (["--debug", "serve"], (True, ["serve"])),
        (["serve", "x", "--debug"], (True, ["serve", "x"])),
        (["archive", "--", "--debug"], (False, ["archive", "--", "--debug"])),
        (["--debug", "archive", "--", "--debug"], (True, ["archive", "--", "--debug"])),
    ],
)
def test_debug_counts_wherever_it_stands_before_a_double_dash(
    argv: list[str], expected: tuple[bool, list[str]]
) -> None:
    assert hoist_debug(argv) == expected


@pytest.mark.usefixtures("processes")
def test_a_reader_that_goes_away_is_no_defect() -> None:
    code = "import sys; from tsx_cli.main import main; sys.exit(main(['config', 'show', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        reported = process.stderr.read()
    assert process.wait(30) == 1
    assert b"Traceback" not in reported
    assert b"defect" not in reported


def test_the_exit_code_of_help_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_what_a_stream_of_another_character_set_cannot_hold_is_reported_as_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, "ascii"))
    app = typer.Typer()
    app.command()(lambda: print("\u00b1 2 %, bad\udcff.mar"))
    assert run(typer.main.get_command(app), "say", []) == 0
    sys.stdout.flush()
    assert said.getvalue() == b"\\xb1 2 %, bad\\udcff.mar\n"
