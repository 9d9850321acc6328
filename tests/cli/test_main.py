"""The command as a whole: help, completion, errors, and exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import typer

from tests.cli.conftest import Run
from tsx_archiver import ArchiveError
from tsx_cli.common.failure import DEBUG_HINT, CliError, UsageError, report, user_code_text
from tsx_cli.common.lazy import command_of
from tsx_cli.main import app, hoist_debug, main, run
from tsx_runtime.errors import LoadFailed
from tsx_runtime.version import __version__

HEAVY = (
    *("torch", "fastapi", "uvicorn", "pydantic", "numpy", "PIL", "yaml", "jinja2", "asyncio"),
    *("tsx_runtime.settings.schema", "tsx_archiver.opening"),
)
COMMANDS = list(command_of(app).commands)
COMMAND_MODULES = tuple(f"tsx_cli.{name}.command" for name in COMMANDS)
MAIN = "import sys; from tsx_cli.main import main; "


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def imported(code: str, names: tuple[str, ...], **environment: str) -> str:
    """Return which of these modules the code imports."""
    code += f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    return python(code, **environment).stdout.splitlines()[-1]


def complete(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Complete a command line."""
    arguments = f"tsx {line}"
    variables = {"COMP_WORDS": arguments, "COMP_CWORD": str(arguments.count(" "))}
    return python(f"{MAIN}main([])", _TSX_COMPLETE="complete_bash", **variables, **environment)


@pytest.mark.usefixtures("processes")
def test_help_imports_no_heavy_modules() -> None:
    assert imported(f"{MAIN}main(['--help'])", (*HEAVY, *COMMAND_MODULES)) == "[]"


@pytest.mark.usefixtures("processes")
def test_the_help_of_a_command_does_not_import_its_implementation() -> None:
    assert imported(f"import {', '.join(COMMAND_MODULES)}", (*HEAVY, "tsx_runtime.core")) == "[]"


@pytest.mark.usefixtures("processes")
def test_completion_does_not_import_commands() -> None:
    variables = {"_TSX_COMPLETE": "complete_bash", "COMP_WORDS": "tsx ", "COMP_CWORD": "1"}
    assert imported(f"{MAIN}main([])", COMMAND_MODULES, **variables) == "[]"
    assert complete("").stdout.split() == COMMANDS


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("serve --management", {"--management-port"}),
        ("archive model.pt --ha", {"--handler"}),
        ("archive --", {"--handler", "--check", "--json", "--help"}),
        ("archive in", {"inspect"}),
        ("models de", {"describe"}),
    ],
)
def test_completion_lists_the_values_of_an_argument(line: str, arguments: set[str]) -> None:
    completed = complete(line).stdout.split()
    assert arguments < set(completed) if line.endswith("--") else arguments == set(completed)
    assert len(completed) == len(set(completed))


@pytest.mark.usefixtures("processes")
def test_completion_without_a_server_prints_nothing() -> None:
    variables = {"TSX_INFERENCE_ADDRESS": "http://127.0.0.1:9", "TSX_NO_SETTING": "1"}
    completed = complete("predict ", **variables)
    assert (completed.stdout.strip(), completed.stderr) == ("", "")


@pytest.mark.usefixtures("processes")
def test_a_completion_script_is_shown() -> None:
    # The parent shell decides for which shell the script is.
    arguments = f"'{sys.executable}' -m tsx_cli --show-completion; exit"
    result = subprocess.run(
        ["bash", "-c", arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert "_COMPLETE" in result.stdout


@pytest.mark.slow
def test_every_command_has_help(run: Run) -> None:
    help_text = run("--help").out
    for name in COMMANDS:
        assert name in help_text
        result = run(name, "--help")
        assert result.code == 0, result.err
        assert f"Usage: tsx {name}" in result.out
        # A flag has no value, so help shows no type for it.
        assert "bool" not in result.out


def test_version_is_reported(run: Run) -> None:
    result = run("--version")
    assert result.code == 0
    assert result.out in (f"tsx {__version__} (compiled)\n", f"tsx {__version__} (pure Python)\n")


def test_an_unknown_command_names_the_nearest_one(run: Run) -> None:
    result = run("serv")
    assert result.code == 2
    assert "Did you mean 'serve'?" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        ("rollout x", "'tsx models rollout'"),
        ("replace x.mar", "'tsx models replace'"),
        ("list", "'tsx models list' or 'tsx jobs list'"),
        ("models predict x", "'tsx predict'"),
        ("jobs register x.mar", "'tsx models register'"),
    ],
)
def test_a_command_of_another_group_is_named_with_its_group(
    run: Run, arguments: str, commands: str
) -> None:
    result = run(arguments)
    assert result.code == 2
    assert f"Did you mean {commands}?" in " ".join(result.err.replace("│", " ").split())


def test_an_unknown_option_is_a_usage_error(run: Run) -> None:
    assert run("serve --prot 1").code == 2


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


def test_an_unexpected_error_is_reported_with_the_option_that_shows_its_traceback() -> None:
    code, text = reported(KeyError("x"))
    assert (code, text.splitlines()[0]) == (1, "Error: KeyError: 'x'")
    assert "run again with --debug" in text


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


def test_only_the_last_place_of_a_workers_traceback_is_shown_by_default() -> None:
    error = LoadFailed("it did not load", traceback=WORKERS_TRACEBACK)
    text = reported(error)[1]
    assert "weights.py, line 3" in text
    assert "handler.py" not in text
    assert WORKERS_TRACEBACK in reported(error, debug=True)[1]
    assert user_code_text("no frame at all") == ""
    # Frames of tsx itself are left out, since they do not explain the error.
    frame = '  File "/lib/loader.py", line 232, in _initialised\nTypeError: wrong\n'
    assert user_code_text(frame) == ""


def test_the_outline_of_a_model_that_fails_to_load_is_complete() -> None:
    error = LoadFailed("it did not load", traceback=WORKERS_TRACEBACK)
    error.outline = "  handler.py:7 in initialize: self.model = load()"
    lines = reported(error.named("m.mar"))[1].splitlines()
    assert lines == ["Error: m.mar does not load: it did not load", error.outline, DEBUG_HINT]


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
def test_debug_is_recognized_anywhere_before_a_double_dash(
    argv: list[str], expected: tuple[bool, list[str]]
) -> None:
    assert hoist_debug(argv) == expected


@pytest.mark.usefixtures("processes")
def test_a_closed_pipe_causes_no_traceback() -> None:
    code = f"{MAIN}sys.exit(main(['config', 'show', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(30) == 1
    assert b"Traceback" not in errors
    assert b"defect" not in errors


def test_the_exit_code_of_help_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_characters_that_a_stream_cannot_encode_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    app = typer.Typer()
    app.command()(lambda: print("\u00b1 2 %, bad\udcff.mar"))
    assert run(typer.main.get_command(app), "say", []) == 0
    sys.stdout.flush()
    assert output.getvalue() == b"\\xb1 2 %, bad\\udcff.mar\n"
