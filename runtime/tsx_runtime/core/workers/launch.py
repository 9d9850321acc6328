"""The command line of a worker that cannot be forked.

Such a worker has another interpreter, the model's own packages or a sandbox, or is a torchrun
group.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import tsx_archiver
import tsx_runtime
from tsx_runtime.core.placement.placement import Parallel
from tsx_runtime.shared.safe_path import CLEAN

# The new interpreter must find this installation of tsx, but nothing in the working directory.
BOOT = (
    CLEAN + "import json; options = json.loads(sys.argv[1]); "
    "sys.path += [root for root in options.pop('roots') if root not in sys.path]; "
    "from tsx_runtime.worker.launch.entry import run_program; run_program(**options)"
)


class Sandbox(ABC):
    """The confinement of one process, which exists from `create` to `remove`."""

    @abstractmethod
    def create(self) -> None:
        """Prepare for the start; this may block.

        Raises:
            OSError: The sandbox cannot be created.
        """

    @abstractmethod
    def command(self, inner: list[str]) -> list[str]:
        """Return the command that enters the sandbox and then runs `inner`."""

    @abstractmethod
    def environment(self, variables: dict[str, str], hidden: Collection[str]) -> dict[str, str]:
        """Return the environment of the process, with `variables` and without those in `hidden`."""

    @abstractmethod
    def remove(self) -> None:
        """Clean up after the process has ended; this may block for some seconds."""


class Launch(NamedTuple):
    """How to start a program instead of a fork.

    With `torchrun` it starts several processes, of which rank 0 talks to the front end.
    """

    python: str = sys.executable
    packages: str | None = None  # a directory with packages that precede the server's
    variables: dict[str, str] = {}
    readable: tuple[str, ...] = ()  # paths that it reads besides the server's and the archive's
    torchrun: tuple[str, ...] = ()  # arguments of torchrun; empty: a single process
    ranks: int = 1  # processes on this machine
    broadcast: bool = True  # whether every rank gets the requests, not only rank 0
    sandbox: Sandbox | None = None  # the sandbox in which the program runs

    def command(self, fd: int, max_open_files: int | None) -> list[str]:
        """Return the command line.

        Args:
            fd: The worker's end of its socket, which the program inherits.
            max_open_files: The limit of its open files.
        """
        roots = [
            str(Path(package.__file__ or "").parents[1]) for package in (tsx_runtime, tsx_archiver)
        ]
        options: dict[str, object] = {
            "roots": list(dict.fromkeys(roots)),
            "fd": fd,
            "max_open_files": max_open_files,
            "packages": self.packages,
        }
        if self.torchrun:
            options["group"] = {
                "arguments": self.torchrun,
                "ranks": self.ranks,
                "broadcast": self.broadcast,
            }
        return [self.python, "-c", BOOT, json.dumps(options)]


class ModelEnvironment(NamedTuple):
    """The interpreter or packages of a model's workers, which exist until `close` is called."""

    launch: Launch
    close: Callable[[], None]


def launch_of(
    parallel: Parallel, environment: ModelEnvironment | None, *, threads: int, group_name: str
) -> Launch | None:
    """Return how to start a worker as a program, or None if it can be forked.

    A model with its own packages cannot be forked: they must precede the server's packages, and a
    fork would have imported those already.
    """
    launch = None if environment is None else environment.launch
    if not parallel.is_group:
        return launch
    program = launch or Launch()
    return program._replace(
        # Otherwise torchrun would set it to 1.
        variables=program.variables | {"OMP_NUM_THREADS": str(threads)},
        torchrun=parallel.arguments(group_name),
        ranks=parallel.ranks,
        broadcast=parallel.broadcast,
    )
