"""The versions of this machine, and the wheel of tsx that an image installs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.image.base import pinned_base
from tsx_cli.deploy.image.programs import this_platform
from tsx_cli.deploy.image.recipe import Local, base_image
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.shared.safe_path import run_module
from tsx_runtime.version import __version__

DISTRIBUTION = "tsx-serve"


@contextmanager
def this_machine(spec: DeploySpec, needs_image: bool = True) -> Generator[Local, None, None]:
    """Yield the versions of this machine, with a wheel of tsx if no package index has this version.

    Raises:
        CliError: The wheel is missing, or cannot be built.
    """
    build, python = spec.build, f"{sys.version_info.major}.{sys.version_info.minor}"
    if not needs_image:
        yield Local(python, "", __version__)
        return
    with scratch_directory("tsx-wheel-") as directory:
        wheel = build.wheel if build.wheel is not None else _wheel_of_tsx(directory)
        if wheel is not None and not (wheel.is_file() and wheel.suffix == ".whl"):
            raise CliError(
                f"build.wheel: {wheel} is not a wheel; `pip wheel --no-deps DIRECTORY` makes one"
            )
        wheel_sha = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel is not None else ""
        base, note = pinned_base(base_image(spec, python))
        yield Local(
            python,
            metadata.version("torch"),
            __version__,
            wheel,
            wheel_sha,
            this_platform(),
            base,
            note,
        )


def _wheel_of_tsx(directory: Path) -> Path | None:
    """Return a wheel of this tsx, or None if tsx came from a package index.

    Images install tsx from the index in the second case.
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # tsx runs from a checkout that is not installed.
        return _build_wheel(Path(__file__).parents[4], directory)
    url = urlsplit(json.loads(text)["url"]) if text else None
    if url is None or url.scheme != "file":
        return None
    path = Path(url2pathname(url.path))
    return path if path.suffix == ".whl" else _build_wheel(path, directory)


def _build_wheel(source: Path, directory: Path) -> Path | None:
    """Build a wheel of a source directory; the same source gives the same bytes."""
    if not (source / "pyproject.toml").is_file():
        return None
    command = [
        sys.executable,
        *run_module("pip"),
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(directory),
        str(source),
    ]
    environment = os.environ | {"TSX_COMPILE": "0"}
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
    )
    if result.returncode != 0:
        raise CliError(
            f"no wheel of tsx could be built from {source}, the source that tsx runs from:"
            f" {result.stdout.strip()}"
        )
    return next(directory.glob("*.whl"))
