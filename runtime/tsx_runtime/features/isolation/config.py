"""Isolated workers: what the settings require, what the system supports, and what a worker may do.

All mechanisms are the kernel's own and need no root: Landlock (files, signals), seccomp (system
calls, network), no_new_privs and dropped capabilities, cgroup v2 (memory, CPU time, processes).
The package `sandbox` makes the system calls; an isolated worker starts with its module `enter`. If
the system cannot enforce the settings, the server reports what is missing and does not start.
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
from tsx_runtime.core.hidden_credentials import WORKER_DEFAULTS
from tsx_runtime.core.workers.launch import Sandbox
from tsx_runtime.errors import SettingError
from tsx_runtime.features.isolation import cgroups
from tsx_runtime.features.isolation.sandbox import landlock, seccomp
from tsx_runtime.features.isolation.sandbox.enter import SandboxConfig
from tsx_runtime.features.isolation.settings import IsolationModelSettings, IsolationSettings
from tsx_runtime.settings.schema import Settings

# Until it has dropped its privileges, the interpreter imports only the standard library and
# tsx_runtime. Its options -I and -S keep it from running `.pth` files and other start-up code.
BOOT = (
    "import json, sys; sys.path.append(sys.argv[1]);"
    " from tsx_runtime.features.isolation.sandbox.enter import enter; enter(json.loads(sys.argv[2]))"
)
# Paths that any worker may read. Files with keys or passwords are left out, because a server that
# runs as root could read them.
SYSTEM_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/proc")
SYS_FILES = ("bus", "class", "devices", "fs/cgroup", "kernel/mm", "module")
ETC_FILES = (
    "alternatives",
    "debian_version",
    "fonts",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "pki/ca-trust",
    "ssl/certs",
    "timezone",
)
SYSTEM_PATHS = [
    *SYSTEM_TREES,
    *(f"/sys/{name}" for name in SYS_FILES),
    *(f"/etc/{name}" for name in ETC_FILES),
]
NETWORK_FILES = [
    "/run/systemd/resolve",
    *(
        f"/etc/{name}"
        for name in ("gai.conf", "host.conf", "hosts", "protocols", "resolv.conf", "services")
    ),
]
DEVICES = [f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero")]
GPU_DEVICES = ("nvidia*", "dri", "kfd")  # patterns in /dev
# Variables that control a computation. Variables that name a directory for output, such as HF_HOME,
# are not listed, since they would lead out of the scratch directory.
PASSED_VARIABLES = {
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
}
PASSED_PREFIXES = (
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
MAX_REMOVE_S = 10.0

logger = logging.getLogger("tsx.isolation")


class Isolation(NamedTuple):
    """The isolation of one model's workers; 0 means no limit."""

    network: bool = False
    memory: int = 0  # megabytes
    cpus: float = 0.0
    processes: int = 0
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    cgroup: Path | None = None

    @property
    def limit_files(self) -> dict[str, str]:
        """The limits as files of a cgroup."""
        return cgroups.limit_files(memory=self.memory, cpus=self.cpus, processes=self.processes)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return a human-readable description of the isolation; limits of 0 are left out."""
        limits = {"memory_mb": self.memory, "cpus": self.cpus, "processes": self.processes}
        return {
            "files": "read only but for a scratch directory (Landlock)",
            "network": self.network,
            "system_calls": "filtered (seccomp)",
            "privileges": "none, and no new ones",
            **{name: value for name, value in limits.items() if value},
        }


def isolation_of(settings: Settings, model: str) -> Isolation | None:
    """Return the isolation of a model's workers, or None if they are not isolated.

    A setting of the model takes precedence over the server's.
    """
    server_settings = IsolationSettings.of(settings)
    model_settings = IsolationModelSettings.of(settings.models, model)

    def setting(name: str) -> object:
        model_value = getattr(model_settings, name, None)
        return getattr(server_settings, name) if model_value is None else model_value

    if setting("isolation") == "off":
        return None
    fields = {name: setting(f"isolation_{name}") for name in Isolation._fields}
    lists = {name: tuple(map(str, item)) for name, item in fields.items() if isinstance(item, list)}
    return Isolation(**(fields | lists))  # type: ignore[arg-type]  # The settings have these types.


def check_isolation(settings: Settings) -> None:
    """Check that this system supports the isolation that the settings require.

    Raises:
        SettingError: The system lacks a feature.
    """
    isolations = {
        **{f"models.{name}.isolation": isolation_of(settings, name) for name in settings.models},
        "isolation": isolation_of(settings, ""),
    }
    for name, isolation in isolations.items():
        if isolation is None:
            continue
        if missing := "; ".join(missing_features(isolation)):
            raise SettingError(f"{name} is on, and this system lacks what it needs: {missing}")
        text = ", ".join(f"{aspect}: {value}" for aspect, value in isolation.describe().items())
        logger.info(
            "%s is on: %s",
            name,
            text if isolation.limit_files else f"{text}; memory, CPU and processes are not limited",
        )


def missing_features(isolation: Isolation) -> Iterable[str]:
    """Yield the features that this system lacks for the isolation, as texts for the user."""
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
    if isolation.limit_files:
        try:
            cgroups.prepare(isolation.cgroup, isolation.limit_files)
        except cgroups.CgroupsUnavailable as error:
            limits = [
                f"isolation_{name}"
                for name in ("memory", "cpus", "processes")
                if getattr(isolation, name)
            ]
            yield f"{', '.join(limits)}: {error}"
    yield from (
        f"{path} of isolation_paths does not exist"
        for path in isolation.paths
        if not Path(path).exists()
    )


class KernelSandbox(Sandbox):
    """The rights, the scratch directory and the cgroup of one process."""

    def __init__(
        self, isolation: Isolation, readable: Iterable[str], *, gpu: bool, output: str, label: str
    ) -> None:
        """Describe the sandbox of a process.

        Args:
            isolation: The isolation of the model.
            readable: Paths that the worker needs in addition to the system's and this Python's.
            gpu: Whether the worker uses a GPU.
            output: The path of the log socket, or an empty string.
            label: The name of the process in the log.
        """
        self._isolation = isolation
        self._readable = [*readable, *isolation.paths]
        self._gpu, self._output, self._label = gpu, output, label
        self.scratch = ""
        self._group: cgroups.Group | None = None

    def create(self) -> None:
        if self._isolation.limit_files:
            try:
                parent = cgroups.prepare(self._isolation.cgroup, self._isolation.limit_files)
            except cgroups.CgroupsUnavailable as error:  # It was possible at the server's start.
                raise OSError(str(error)) from error
            self._group = cgroups.Group(parent, self._isolation.limit_files)
        self.scratch = tempfile.mkdtemp(prefix="tsx-scratch-", dir=temporary_directory())

    def command(self, inner: list[str]) -> list[str]:
        config = SandboxConfig(
            command=inner,
            scratch=self.scratch,
            read=[
                *SYSTEM_PATHS,
                *(NETWORK_FILES if self._isolation.network else []),
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
        return [sys.executable, "-I", "-S", "-c", BOOT, root, json.dumps(config)]

    def environment(self, variables: dict[str, str], hidden: Collection[str]) -> dict[str, str]:
        """Return `variables` and the server's variables that an isolated worker may read.

        They control computations, or `isolation_variables` names them; none of them is `hidden`.
        """
        passed = {
            name: value
            for name, value in os.environ.items()
            if (
                name in PASSED_VARIABLES
                or name.startswith(PASSED_PREFIXES)
                or name in self._isolation.variables
            )
            and name not in hidden
        }
        scratch_variables = {
            "HOME": self.scratch,
            "TMPDIR": self.scratch,
            # Python would derive it from HOME otherwise.
            "PYTHONUSERBASE": site.getuserbase(),
        }
        return WORKER_DEFAULTS | passed | variables | scratch_variables

    def remove(self) -> None:
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
        removal = subprocess.Popen(["rm", "-rf", "--", self.scratch], stderr=subprocess.DEVNULL)
        try:
            if removal.wait(MAX_REMOVE_S):
                logger.warning(
                    "%s: the scratch directory %s cannot be removed", self._label, self.scratch
                )
        except subprocess.TimeoutExpired:  # The removal continues while the next worker runs.
            logger.warning(
                "%s: the scratch directory %s is large and still being removed",
                self._label,
                self.scratch,
            )


def python_paths() -> list[str]:
    """Return the directories of this Python and its packages.

    A working directory on the path is left out, because it may hold any file.
    """
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *site.getsitepackages()}
    excluded = {"", "/", str(Path.home()), str(Path.cwd())}
    return sorted(path for path in paths if path not in excluded and Path(path).is_absolute())
