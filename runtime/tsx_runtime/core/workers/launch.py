"""The command line of a worker that cannot be forked: another interpreter, the model's own
packages, a torchrun group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import tsx_archiver
import tsx_runtime
from tsx_runtime.core.environments.venvs import ModelEnvironment
from tsx_runtime.core.isolation.config import Sandbox
from tsx_runtime.core.placement.placement import Parallel
from tsx_runtime.shared.safe_path import CLEAN

# The new interpreter has to find this installation, and nothing by accident.
BOOT = (
    CLEAN + "import json; options = json.loads(sys.argv[1]); "
    "sys.path += [root for root in options.pop('roots') if root not in sys.path]; "
    "from tsx_runtime.worker.launch.entry import run_program; run_program(**options)"
)


class Launch(NamedTuple):
    """A program instead of a fork.

    With `torchrun` it starts that many processes, of which rank 0 speaks to the front end.
    """

    python: str = sys.executable
    packages: str | None = None  # a directory of packages that come before those of the server
    variables: dict[str, str] = {}
    torchrun: tuple[str, ...] = ()  # its arguments; without them the program is the worker itself
    ranks: int = 1  # on this machine
    broadcast: bool = True  # whether every rank gets the requests, or only rank 0
    sandbox: Sandbox | None = None  # of this one process

    def command(self, fd: int, files: int | None) -> list[str]:
        """`fd`: the worker's end of its socket, which the program inherits.

        `files`: how many it may have open.
        """
        roots = [
            str(Path(package.__file__ or "").parents[1]) for package in (tsx_runtime, tsx_archiver)
        ]
        options: dict[str, object] = {
            "roots": list(dict.fromkeys(roots)),
            "fd": fd,
            "files": files,
            "packages": self.packages,
        }
        if self.torchrun:
            options["group"] = {
                "arguments": self.torchrun,
                "ranks": self.ranks,
                "broadcast": self.broadcast,
            }
        return [self.python, "-c", BOOT, json.dumps(options)]


def launch_of(
    parallel: Parallel,
    environment: ModelEnvironment | None,
    *,
    use_venv: bool,
    threads: int,
    group: str,
    sandbox: Sandbox | None = None,
) -> Launch | None:
    """None where a fork will do: packages of the model's own must come before those that a fork has
    imported already.
    """
    if environment is None and not parallel.is_group and sandbox is None:
        return None
    activated = environment is not None and use_venv
    variables = environment.variables() if environment is not None and activated else {}
    if parallel.is_group:
        variables["OMP_NUM_THREADS"] = str(threads)  # torchrun would set it to 1
    return Launch(
        python=environment.python if environment is not None and activated else sys.executable,
        packages=environment.packages if environment is not None and not activated else None,
        variables=variables,
        torchrun=parallel.arguments(group) if parallel.is_group else (),
        ranks=parallel.ranks,
        broadcast=parallel.broadcast,
        sandbox=sandbox,
    )
