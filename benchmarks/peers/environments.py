"""The peers' environments, made from PyPI when they are needed, and renewed after changes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks import servers

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
MODEL_REQUIREMENTS = ("torch", "numpy", "Pillow")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "TorchServe": (
        "torchserve==0.12.0",
        "torch-model-archiver==0.12.0",
        "PyYAML",
        *MODEL_REQUIREMENTS,
    ),
    "Mosec": ("mosec==0.9.8", *MODEL_REQUIREMENTS),
    "LitServe": ("litserve==0.2.19", *MODEL_REQUIREMENTS),
    "LitServe_typed": ("litserve==0.2.19",),
    "FastAPI": ("fastapi", "uvicorn[standard]"),
    "LitServe_texts": ("litserve==0.2.19", "torch", "transformers", "sentence-transformers"),
    "archiver": ("torch-model-archiver==0.12.0",),
}


class Missing(Exception):
    """Something is missing on this machine; the text names it and what to do."""


def default_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsx-benchmarks"


def environment_of(name: str, directory: Path) -> Path:
    """Return the environment of a peer.

    Raises:
        Missing: The environment cannot be made.
    """
    path = os.environ.get(f"TSX_PEER_{name.upper()}")
    if path:
        return Path(path)
    contents = (
        f"Python {platform.python_version()}:"
        f" {' '.join(REQUIREMENTS[name])}\n{CONSTRAINTS.read_text()}"
    )
    environment = directory / name.lower()
    # The file is written last, so it marks a complete environment.
    label = environment / "made-of.txt"
    # The constraints may have new pins, which belong to other packages.
    if label.exists() and set(label.read_text().splitlines()) <= set(contents.splitlines()):
        return environment
    print(f"making {environment}", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    install(environment, name)
    label.write_text(contents)
    return environment


def install(environment: Path, name: str) -> None:
    command: list[str | Path] = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    finished = subprocess.run(
        [*command, "--constraint", CONSTRAINTS, *REQUIREMENTS[name]],
        env=servers.foreign_environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or [
            f"pip ended with {finished.returncode}"
        ]
        raise Missing(f"pip could not install {REQUIREMENTS[name][0]} ({errors[-1]})")


def program(name: str, package: str) -> None:
    if shutil.which(name) is None:
        raise Missing(f"there is no {name} on the PATH (on Debian: apt install {package})")
