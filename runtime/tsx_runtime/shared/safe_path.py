"""Removes the working directory from the import path: a `json.py` in the start directory must not
replace the server's module.

Python puts it there for programs of `-c` and `-m`, and where PYTHONPATH has an empty entry, as
`/a:` has. `python -P` and PYTHONSAFEPATH would not, but Python 3.10 does not know them, and the
programs that a handler starts would inherit the variable.

What Python itself imports before the first line of a program cannot be helped from here: of a
program of `-m` that is `contextlib` and what it needs, so images start theirs by `run_module`.

This module imports only what Python has imported when it starts.
"""

import os
import sys

# First in a program of `-c`, before anything is read from a file.
CLEAN = (
    "import os, sys; named = os.environ.get('PYTHONPATH', '/').split(os.pathsep); sys.path[:] ="
    " [place for place in sys.path if place and ('' not in named or place in named or place !="
    " os.getcwd())]; "
)


def leave_out_working_directory() -> None:
    """Of this process, and of those that it starts.

    The first that a command does, before its other imports.
    """
    exec(CLEAN, {})
    if _is_by_m() and not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  # not imported yet
        del sys.path[0]
    given = os.environ.get("PYTHONPATH", "")
    named = [place for place in given.split(os.pathsep) if place]
    if os.pathsep.join(named) != given:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)


def run_module(name: str) -> list[str]:
    """What comes behind `python` in place of `-m NAME`."""
    return [
        "-c",
        f"{CLEAN}import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)",
    ]


def is_command() -> bool:
    """Whether this process was started as one of the commands that serve models."""
    return (
        os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe")  # noqa: PTH119
        in ("tsx", "torchserve")
        or _is_by_m()
    )


def _is_by_m() -> bool:
    """Whether this program was started as `python -m NAME`, with a name of tsx's."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return words[-2:-1] == ["-m"] and words[-1].startswith("tsx_")
