"""Isolated workers: the isolation that the settings require, whether this system supports it, and
the rights that each process keeps.

The mechanisms are the kernel's own and need no root: Landlock (files, signals), seccomp (system
calls, network), no_new_privs and dropped capabilities, cgroup v2 (memory, CPU time, processes).
`tsx_runtime/sandbox` has the system calls; an isolated worker is a program that starts there. A
promise that cannot be held is no warning: the server does not start, and says what is missing.
"""

from __future__ import annotations

import json
import logging
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import tsx_runtime
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.core.isolation import cgroups
from tsx_runtime.core.isolation.hidden_credentials import DEFAULTS
from tsx_runtime.errors import SettingError
from tsx_runtime.sandbox import landlock, seccomp
from tsx_runtime.sandbox.enter import SandboxConfig
from tsx_runtime.settings.schema import Settings

# The new interpreter sees the standard library alone until everything is given up.
BOOT = (
    "import json, sys; sys.path.append(sys.argv[1]); from tsx_runtime.sandbox.enter import enter;"
    " enter(json.loads(sys.argv[2]))"
)
# What any worker may read. Of /etc nothing that holds keys or passwords: a server that runs as root
# owns all of it.
TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/proc")
OF_SYS = ("bus", "class", "devices", "fs/cgroup", "kernel/mm", "module")
OF_ETC = (
    "alternatives",
    "debian_version",
    "fonts",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
)
OF_ETC_ALSO = ("nsswitch.conf", "os-release", "passwd", "pki/ca-trust", "ssl/certs", "timezone")
SYSTEM = [
    *TREES,
    *(f"/sys/{name}" for name in OF_SYS),
    *(f"/etc/{name}" for name in (*OF_ETC, *OF_ETC_ALSO)),
]
OF_NETWORK = [
    "/run/systemd/resolve",
    *(
        f"/etc/{name}"
        for name in ("gai.conf", "host.conf", "hosts", "protocols", "resolv.conf", "services")
    ),
]
DEVICES = [f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero")]
GPU_DEVICES = ("nvidia*", "dri", "kfd")  # in /dev
# Variables that say how to compute; those that say where to write would lead out of the scratch
# directory.
VARIABLES = {"PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"}
VARIABLES |= {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS"}
FAMILIES = (
    "LC_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "CUBLAS_",
    "CUDNN_",
    "PYTORCH_",
    "MALLOC_",
)
REMOVE_TIME = 10.0  # seconds

logger = logging.getLogger("tsx.isolation")


class Isolation(NamedTuple):
    """The isolation settings of one model's workers. 0 in `memory`, `cpus` and `processes` means no
    limit.
    """

    network: bool = False
    memory: int = 0  # megabytes
    cpus: float = 0.0
    processes: int = 0
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    cgroup: Path | None = None

    @property
    def bounds(self) -> dict[str, str]:
        return cgroups.bounds(memory=self.memory, cpus=self.cpus, processes=self.processes)

    def describe(self) -> dict[str, str | int | float | bool]:
        """What holds, for people: a bound that is not set is absent."""
        bounded = {"memory_mb": self.memory, "cpus": self.cpus, "processes": self.processes}
        return {
            "files": "read only but for a scratch directory (Landlock)",
            "network": self.network,
            "system_calls": "filtered (seccomp)",
            "privileges": "none, and no new ones",
            **{name: value for name, value in bounded.items() if value},
        }


def isolation_of(settings: Settings, model: str) -> Isolation | None:
    """What the server sets for this model, and where it does not, for all; None where its workers
    are not isolated.
    """
    own = settings.models.get(model)

    def value(name: str) -> object:
        asked = getattr(own, name, None)
        return getattr(settings, name) if asked is None else asked

    if value("isolation") == "off":
        return None
    parts = {name: value(f"isolation_{name}") for name in Isolation._fields}
    listed = {name: tuple(map(str, each)) for name, each in parts.items() if isinstance(each, list)}
    return Isolation(**(parts | listed))  # type: ignore[arg-type]  # the settings have the types


def check_isolation(settings: Settings) -> None:
    """Raises SettingError where this system does not have what the settings promise."""
    models = [name for name in settings.models if isolation_of(settings, name) is not None]
    asked = [(f"models.{name}.isolation", isolation_of(settings, name)) for name in models] + [
        ("isolation", isolation_of(settings, ""))
    ]
    for name, isolation in asked:
        if isolation is None:
            continue
        if missing := "; ".join(lacking(isolation)):
            raise SettingError(f"{name} is on, and this system lacks what it needs: {missing}")
        text = ", ".join(f"{what}: {value}" for what, value in isolation.describe().items())
        logger.info(
            "%s is on: %s",
            name,
            text if isolation.bounds else f"{text}; memory, CPU and processes are not limited",
        )


def lacking(isolation: Isolation) -> Iterable[str]:
    """What this system does not have of what is promised."""
    if sys.platform != "linux":
        yield "isolation needs Linux"
        return
    if not landlock.abi():
        yield (
            "the kernel has no Landlock (Linux 5.13 or later, with landlock among its security"
            " modules)"
        )
    if seccomp.library() is None:
        yield "libseccomp.so.2 is not installed (apt-get install libseccomp2)"
    if isolation.bounds:
        try:
            cgroups.prepare(isolation.cgroup, isolation.bounds)
        except cgroups.NoGroups as error:
            bounded = [
                f"isolation_{name}"
                for name in ("memory", "cpus", "processes")
                if getattr(isolation, name)
            ]
            yield f"{', '.join(bounded)}: {error}"
    yield from (
        f"{path} of isolation_paths does not exist"
        for path in isolation.paths
        if not Path(path).exists()
    )


class Sandbox:
    """Of one process: its scratch directory and its group, which are there from `create`, which may
    raise OSError, to `remove`.
    """

    def __init__(
        self, isolation: Isolation, readable: Iterable[str], *, gpu: bool, output: str, label: str
    ) -> None:
        """`readable`: what the worker needs beside the system and this Python.

        `output`, `label`: see `SandboxConfig`.
        """
        self._isolation = isolation
        self._readable = [*readable, *isolation.paths]
        self._gpu, self._output, self._label = gpu, output, label
        self.scratch = ""
        self._group: cgroups.Group | None = None

    def create(self) -> None:
        if self._isolation.bounds:
            try:
                parent = cgroups.prepare(self._isolation.cgroup, self._isolation.bounds)
            except cgroups.NoGroups as error:  # it was there when the server started
                raise OSError(str(error)) from error
            self._group = cgroups.Group(parent, self._isolation.bounds)
        self.scratch = tempfile.mkdtemp(prefix="tsx-scratch-", dir=temporary_directory())

    def command(self, inner: list[str]) -> list[str]:
        """The program that becomes `inner`."""
        cell = SandboxConfig(
            command=inner,
            scratch=self.scratch,
            read=[
                *SYSTEM,
                *(OF_NETWORK if self._isolation.network else []),
                *python_paths(),
                *self._readable,
            ],
            devices=[
                *DEVICES,
                *(
                    str(path)
                    for pattern in GPU_DEVICES
                    if self._gpu
                    for path in Path("/dev").glob(pattern)
                ),
            ],
            network=self._isolation.network,
            group=None if self._group is None else str(self._group.path),
            output=self._output or None,
            label=self._label,
        )
        root = str(Path(tsx_runtime.__file__ or "").parents[1])
        return [sys.executable, "-I", "-S", "-c", BOOT, root, json.dumps(cell)]

    def environment(self, variables: dict[str, str], hidden: Collection[str]) -> dict[str, str]:
        """Of the server's own variables only what says how to compute, or is named; never a secret
        that was not named.
        """
        passed = {
            name: value
            for name, value in os.environ.items()
            if (name in VARIABLES or name.startswith(FAMILIES) or name in self._isolation.variables)
            and name not in hidden
        }
        own = {
            "HOME": self.scratch,
            "TMPDIR": self.scratch,
            "PYTHONUSERBASE": site.getuserbase(),
        }  # the last would follow HOME
        return DEFAULTS | passed | variables | own

    def remove(self) -> None:
        """Once the process has ended. Blocks for some seconds: the worker may have written much."""
        if self._group is not None:
            if self._group.ran_out_of_memory():
                logger.error(
                    "%s: a worker was killed because it used more than isolation_memory, %d MB",
                    self._label,
                    self._isolation.memory,
                )
            self._group.remove()
        if not self.scratch:
            return
        removing = subprocess.Popen(["rm", "-rf", "--", self.scratch], stderr=subprocess.DEVNULL)
        try:
            if removing.wait(REMOVE_TIME):
                logger.warning(
                    "%s: the scratch directory %s cannot be removed", self._label, self.scratch
                )
        except subprocess.TimeoutExpired:  # it goes on; the next worker need not wait for it
            logger.warning(
                "%s: the scratch directory %s is large and still being removed",
                self._label,
                self.scratch,
            )


def python_paths() -> list[str]:
    """Where this Python and its packages are.

    A working directory on the path is left out: it may hold anything.
    """
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *site.getsitepackages()}
    nothing = {"", "/", str(Path.home()), str(Path.cwd())}
    return sorted(path for path in found if path not in nothing and Path(path).is_absolute())
