"""Removal of the working directory from the import path.

A `json.py` in the working directory must not replace the standard library's module. Python adds
this directory for `-c` and `-m`, and for an empty entry of PYTHONPATH such as the end of `/a:`.
Python 3.10 has neither `python -P` nor PYTHONSAFEPATH. Besides, a handler's child processes would
inherit that variable.

With `-m`, Python imports `contextlib` and its dependencies before the first line of the program, so
a file in the working directory could replace them. Therefore images start their programs with the
arguments of `run_module`.

This module imports only modules that Python itself has imported at its start.
"""

import os
import sys

# The first statement of a program for `python -c`; it must precede all imports from files.
CLEAN = (
    "import os, sys; named = os.environ.get('PYTHONPATH', '/').split(os.pathsep); sys.path[:] ="
    " [path for path in sys.path if path and ('' not in named or path in named or path !="
    " os.getcwd())]; "
)


def remove_working_directory() -> None:
    """Remove the working directory from the import path of this process and of its children.

    A command calls this before its other imports.
    """
    exec(CLEAN, {})
    is_safe = getattr(sys.flags, "safe_path", False)
    # os.getcwd, because pathlib is not imported yet.
    if _is_own_module() and not is_safe and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
        del sys.path[0]
    old_path = os.environ.get("PYTHONPATH", "")
    new_path = os.pathsep.join(filter(None, old_path.split(os.pathsep)))
    if new_path != old_path:
        os.environ["PYTHONPATH"] = new_path


def run_module(name: str) -> list[str]:
    """Return the arguments of `python` that run a module, without the working directory."""
    return [
        "-c",
        f"{CLEAN}import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)",
    ]


def is_command() -> bool:
    """Tell whether this process was started as one of the commands that serve models."""
    return (
        os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe")  # noqa: PTH119
        in ("tsx", "torchserve")
        or _is_own_module()
    )


def _is_own_module() -> bool:
    """Tell whether this program was started as `python -m NAME` with a module of tsx."""
    options = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return options[-2:-1] == ["-m"] and options[-1].startswith("tsx_")
