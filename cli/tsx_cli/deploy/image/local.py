"""The versions of this machine, which an image uses as well."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tsx_archiver.storage.private_directory import temporary_directory
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
    """With a wheel of tsx where this is a version that no package index has, built from where it
    was installed from. Raises CliError.
    """
    build, python = spec.build, f"{sys.version_info.major}.{sys.version_info.minor}"
    if not needs_image:
        yield Local(python, "", __version__)
        return
    with tempfile.TemporaryDirectory(prefix="tsx-wheel-", dir=temporary_directory()) as place:
        found = build.wheel if build.wheel is not None else _own_wheel(Path(place))
        if found is not None and not (found.is_file() and found.suffix == ".whl"):
            raise CliError(
                f"build.wheel: {found} is not a wheel; `pip wheel --no-deps DIRECTORY` makes one"
            )
        sha = hashlib.sha256(found.read_bytes()).hexdigest() if found is not None else ""
        base, note = pinned_base(base_image(spec, python))
        yield Local(
            python, metadata.version("torch"), __version__, found, sha, this_platform(), base, note
        )


def image_builder(spec: DeploySpec) -> AbstractContextManager[Local | None]:
    """None where the image is there already, and where none is needed."""
    return this_machine(spec) if spec.builds_image else nullcontext()


def _own_wheel(place: Path) -> Path | None:
    """None where tsx came from a package index: images get it from there as well."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return _built(Path(__file__).parents[4], place)
    url = urlsplit(json.loads(text)["url"]) if text else None
    if url is None or url.scheme != "file":
        return None
    path = Path(url2pathname(url.path))
    return path if path.suffix == ".whl" else _built(path, place)


def _built(source: Path, place: Path) -> Path | None:
    """The same source gives the same bytes."""
    if not (source / "pyproject.toml").is_file():
        return None
    command = [
        sys.executable,
        *run_module("pip"),
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(place),
        str(source),
    ]
    pure = os.environ | {"TSX_COMPILE": "0"}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=pure,
    )
    if done.returncode != 0:
        raise CliError(
            f"no wheel of tsx could be built from {source}, the source that tsx runs from:"
            f" {done.stdout.strip()}"
        )
    return next(place.glob("*.whl"))
