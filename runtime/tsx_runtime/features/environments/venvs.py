"""Python environments for models with packages of their own, built once and shared.

An environment is a venv that also sees the server's packages, so pip installs only requirements
that these do not satisfy. Its name is a digest of the requirements, the archive's wheels, this
Python, its packages and pip's options. It is built in a temporary directory of the cache and then
renamed (`tsx_archiver.storage.cache`). Thus an interrupted build is never used, and two models with
the same inputs share one build.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import site
import sys
import sysconfig
import venv
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tsx_archiver import CacheError, default_cache
from tsx_archiver.storage.cache import Cache, CacheLimits, release
from tsx_runtime.core.workers.launch import Launch, ModelEnvironment
from tsx_runtime.errors import InvalidModel
from tsx_runtime.features.environments.pip import (
    OPTIONS,
    PipFailed,
    PipProcesses,
    environment_of_pip,
    install,
)
from tsx_runtime.features.environments.requirements import (
    BadRequirements,
    Requirements,
    read_requirements,
)

MAX_UNUSED_BYTES = 32 << 30
MAX_UNUSED = 64  # unused environments that stay, whatever their size
MAX_BUILDS = 4  # builds at the same time
LAYOUT_VERSION = 1  # Raise it to build all environments again.


class Environments:
    """Builds environments in threads and processes, so that the event loop stays free."""

    def __init__(
        self, cache_dir: Path | None, *, timeout: float, age: float, hidden: Collection[str] = ()
    ) -> None:
        """Prepare to build environments; the first build starts a thread.

        Args:
            cache_dir: The directory of the cache. None means the user's default cache.
            timeout: Seconds for one installation.
            age: Seconds for which an environment stays after its last use.
            hidden: Environment variables that pip and the build programs of packages must not see.
        """
        self._cache_dir = cache_dir
        self._timeout = timeout
        self._cache_limits = CacheLimits(age, MAX_UNUSED_BYTES, MAX_UNUSED)
        self._threads = ThreadPoolExecutor(MAX_BUILDS, thread_name_prefix="tsx-environment")
        self._runs = PipProcesses(hidden)

    async def open(
        self, model: str, model_dir: Path, requirements_file: str | None, *, use_venv: bool
    ) -> ModelEnvironment:
        """Return the environment for an archive's requirements; without any, it has no packages.

        The cache keeps it at least until it is closed. With `use_venv`, workers run its
        interpreter; otherwise they run the server's, with its packages first.

        Raises:
            InvalidModel: The requirements are refused, or cannot be installed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._open, model, model_dir, requirements_file, use_venv
        )

    def close(self) -> None:
        """End the running builds."""
        self._runs.kill_all()
        self._threads.shutdown(cancel_futures=True)

    def _open(
        self, model: str, model_dir: Path, requirements_file: str | None, use_venv: bool
    ) -> ModelEnvironment:
        if os.name == "nt":
            raise _installation_error(
                model,
                "A model's own environment needs Linux or macOS. Install the model's packages where"
                " tsx runs.",
            )
        try:
            requirements = read_requirements(model_dir, requirements_file)
            cache = Cache(self._cache_dir or default_cache(), self._cache_limits, "environments")

            def make(directory: Path) -> Mapping[str, int]:
                return self._build(model, model_dir, requirements, directory, cache)

            entry = cache.open(environment_key(requirements), make)
        except BadRequirements as error:
            raise _installation_error(model, f"{error}.") from error
        except (PipFailed, CacheError, OSError) as error:
            raise _installation_error(model, str(error)) from error
        return ModelEnvironment(_launch(entry.files, use_venv), partial(release, entry.lock))

    def _build(
        self, model: str, model_dir: Path, requirements: Requirements, directory: Path, cache: Cache
    ) -> Mapping[str, int]:
        in_venv = sys.prefix != sys.base_prefix
        venv.EnvBuilder(system_site_packages=not in_venv, symlinks=True).create(directory)
        _show_server_packages(directory)
        if requirements.file is not None:
            install(
                f'model "{model}"',
                directory,
                model_dir,
                requirements,
                timeout=self._timeout,
                runs=self._runs,
            )
        _rename_scripts(directory, cache.root / "entries" / directory.parent.name / directory.name)
        return _file_sizes(directory)


def environment_key(requirements: Requirements) -> str:
    """Return a digest of the inputs of an environment."""
    server_packages = sorted(
        {
            f"{distribution.metadata['Name']}=={distribution.version}"
            for distribution in importlib.metadata.distributions()
        }
    )
    inputs = {
        "scheme": LAYOUT_VERSION,
        "inputs": requirements.inputs,
        "wheel_places": len(requirements.wheel_directories),
        "python": [
            sys.implementation.cache_tag,
            platform.python_version(),
            sys.prefix,
            sysconfig.get_platform(),
        ],
        "server": server_packages,
        "options": [
            *OPTIONS,
            *sorted(f"{name}={value}" for name, value in environment_of_pip(os.environ).items()),
        ],
    }
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _launch(directory: Path, use_venv: bool) -> Launch:
    readable = (str(directory),)
    if not use_venv:
        return Launch(packages=str(packages_directory(directory)), readable=readable)
    # An activation of the venv would set these variables.
    path = f"{directory / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = {"VIRTUAL_ENV": str(directory), "PATH": path}
    return Launch(str(directory / "bin" / "python"), variables=variables, readable=readable)


def packages_directory(directory: Path) -> Path:
    """Return the directory of a venv's packages, on Linux and macOS."""
    return (
        directory
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )


def _show_server_packages(directory: Path) -> None:
    """Let a venv see the server's packages.

    If the server itself runs in a venv, a new venv would only see the packages of the base Python.
    """
    site_directories = [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    lines = [
        f"import site; site.addsitedir({entry!r})\n"
        for entry in site_directories
        if Path(entry).is_dir()
    ]
    (packages_directory(directory) / "zz-server.pth").write_text("".join(lines), encoding="utf-8")


def _rename_scripts(directory: Path, final_directory: Path) -> None:
    """Replace the path of the interpreter in scripts before the directory is renamed."""
    for script in (directory / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        new_content = content.replace(str(directory).encode(), str(final_directory).encode())
        if new_content != content:
            script.write_bytes(new_content)


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return file sizes by path, without `.pyc` files, which Python may rewrite."""
    sizes = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            if not name.endswith(".pyc") and not path.is_symlink():
                sizes[str(path.relative_to(directory))] = path.stat().st_size
    return sizes


def _installation_error(model: str, reason: str) -> InvalidModel:
    """Return the error in TorchServe's wording, which its clients know."""
    return InvalidModel(f"Custom pip package installation failed for model {model}\n{reason}")
