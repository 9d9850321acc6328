"""The `tsx` command: its subcommands and their exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tsx_cli.common.failure import FAILED, INTERRUPTED, report
from tsx_cli.common.lazy import HELP_OPTIONS, LazyGroup, command_of
from tsx_runtime.version import __version__, is_compiled

app = typer.Typer(
    cls=LazyGroup,
    help="From a trained PyTorch model to an HTTP endpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"tsx {__version__} ({'compiled' if is_compiled() else 'pure Python'})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code: 0 success, 1 failure, 2 wrong usage."""
    return run(command_of(app), "tsx", sys.argv[1:] if argv is None else argv)


def run(command: Any, prog_name: str, argv: Sequence[str]) -> int:
    """Run a command, and return its exit code.

    An error is printed as one message.
    """
    debug, argv = hoist_debug(argv)
    # The encoding of a terminal or a log may lack some characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command.main(args=list(argv), prog_name=prog_name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Without this, the interpreter prints an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # the process's boundary
        return report(error, debug=debug, file=sys.stderr)
    return 0


def hoist_debug(argv: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Find and remove `--debug`, which may be anywhere before a `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    if "--debug" not in argv[:end]:
        return False, argv
    return True, [
        argument
        for position, argument in enumerate(argv)
        if argument != "--debug" or position > end
    ]
