"""The Python environments of models with their own packages: built once, named by a digest of their
inputs, and shared.

An environment is a venv that also sees the server's own packages, so pip installs only what these
do not meet. Its name is a digest of the requirements, of the wheels in the archive, of this Python,
of what is installed with it, and of pip's options; it is built beside the cache and renamed into it
whole (`tsx_archiver.storage.cache`), so a build that was broken off is never used, and two models
that ask for the same wait for one build.
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
from dataclasses import dataclass
from pathlib import Path

from tsx_archiver import CacheError, default_cache
from tsx_archiver.storage.cache import Cache, CacheEntry, CacheLimits, release
from tsx_runtime.core.environments.pip import OPTIONS, PipFailed, Runs, environment_of_pip, install
from tsx_runtime.core.environments.requirements import (
    BadRequirements,
    Requirements,
    read_requirements,
)
from tsx_runtime.errors import InvalidModel

MAX_UNUSED_BYTES = 32 << 30  # of environments
MOST_UNUSED = 64  # environments, however small
BUILDERS = 4  # at once; more wait for their turn
SCHEME = 1  # of the layout of an environment; a new number recreates all of them


@dataclass
class ModelEnvironment:
    """In use until it is closed."""

    directory: Path
    entry: CacheEntry

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    @property
    def packages(self) -> str:
        return str(packages_of(self.directory))

    def variables(self) -> dict[str, str]:
        """What activating it would set."""
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {"VIRTUAL_ENV": str(self.directory), "PATH": path}

    def close(self) -> None:
        release(self.entry.lock)


class Environments:
    """Builds environments in threads and separate processes, so that the event loop never waits."""

    def __init__(
        self, cache_dir: Path | None, *, timeout: float, age: float, hidden: Collection[str] = ()
    ) -> None:
        """`age`: seconds for which environments are kept after their last use.

        `hidden`: variables that packages must not have.
        """
        self._cache_dir = cache_dir
        self._timeout = timeout
        self._keep = CacheLimits(age, MAX_UNUSED_BYTES, MOST_UNUSED)
        self._threads = ThreadPoolExecutor(BUILDERS, thread_name_prefix="tsx-environment")
        self._runs = Runs(hidden)

    async def open(
        self, model: str, model_dir: Path, requirements_file: str | None
    ) -> ModelEnvironment:
        """The environment for the archive's requirements; a bare one where it has none.

        Raises InvalidModel.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._open, model, model_dir, requirements_file
        )

    def close(self) -> None:
        """Ends builds that are under way."""
        self._runs.end_all()
        self._threads.shutdown(cancel_futures=True)

    def _open(self, model: str, model_dir: Path, requirements_file: str | None) -> ModelEnvironment:
        if os.name == "nt":
            raise _failed(
                model,
                "A model's own environment needs Linux or macOS. Install the model's packages where"
                " tsx runs.",
            )
        try:
            requirements = read_requirements(model_dir, requirements_file)
            cache = Cache(self._cache_dir or default_cache(), self._keep, "environments")

            def make(directory: Path) -> Mapping[str, int]:
                return self._build(model, model_dir, requirements, directory, cache)

            entry = cache.open(key_of(requirements), make)
        except BadRequirements as error:
            raise _failed(model, f"{error}.") from error
        except PipFailed as error:
            raise _failed(model, str(error)) from error
        except (CacheError, OSError) as error:
            raise _failed(model, str(error)) from error
        return ModelEnvironment(entry.files, entry)

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
        return _sizes(directory)


def key_of(requirements: Requirements) -> str:
    """What an environment is made of, as one digest."""
    server = sorted(
        {
            f"{found.metadata['Name']}=={found.version}"
            for found in importlib.metadata.distributions()
        }
    )
    made_of = {
        "scheme": SCHEME,
        "inputs": requirements.inputs,
        "wheel_places": len(requirements.wheel_places),
        "python": [
            sys.implementation.cache_tag,
            platform.python_version(),
            sys.prefix,
            sysconfig.get_platform(),
        ],
        "server": server,
        "options": [
            *OPTIONS,
            *sorted(f"{name}={value}" for name, value in environment_of_pip(os.environ).items()),
        ],
    }
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def packages_of(directory: Path) -> Path:
    """Where a venv has its packages, on Linux and macOS."""
    return (
        directory
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )


def _show_server_packages(directory: Path) -> None:
    """Where the server runs in a venv itself, the new one would see the packages of the Python
    below both, not the server's.
    """
    places = [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    lines = [
        f"import site; site.addsitedir({place!r})\n" for place in places if Path(place).is_dir()
    ]
    (packages_of(directory) / "zz-server.pth").write_text("".join(lines), encoding="utf-8")


def _rename_scripts(directory: Path, final: Path) -> None:
    """Scripts begin with the path of their interpreter, and the directory is about to be
    renamed.
    """
    for script in (directory / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        changed = content.replace(str(directory).encode(), str(final).encode())
        if changed != content:
            script.write_bytes(changed)


def _sizes(directory: Path) -> dict[str, int]:
    """By path. Compiled files are left out, since Python may rewrite them."""
    sizes = {}
    for place, _, names in os.walk(directory):
        for name in names:
            path = Path(place, name)
            if not name.endswith(".pyc") and not path.is_symlink():
                sizes[str(path.relative_to(directory))] = path.stat().st_size
    return sizes


def _failed(model: str, why: str) -> InvalidModel:
    """TorchServe's first words, which its clients look for, then the reason."""
    return InvalidModel(f"Custom pip package installation failed for model {model}\n{why}")
