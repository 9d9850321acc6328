"""The peers' own environments: made from PyPI when first needed, kept, and made anew when they are
to hold something else.
"""

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
MODELS_NEED = ("torch", "numpy", "Pillow")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "TorchServe": ("torchserve==0.12.0", "torch-model-archiver==0.12.0", "PyYAML", *MODELS_NEED),
    "Mosec": ("mosec==0.9.8", *MODELS_NEED),
    "LitServe": ("litserve==0.2.19", *MODELS_NEED),
    "LitServe_texts": ("litserve==0.2.19", "torch", "transformers", "sentence-transformers"),
    "archiver": ("torch-model-archiver==0.12.0",),
}


class Missing(Exception):
    """Something is not to be had on this machine; the text says what, and what would help."""


def default_place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsx-benchmarks"


def made(name: str, place: Path) -> Path:
    """The environment of a peer; raises Missing where it cannot be made."""
    given = os.environ.get(f"TSX_PEER_{name.upper()}")
    if given:
        return Path(given)
    wanted = (
        f"Python {platform.python_version()}:"
        f" {' '.join(REQUIREMENTS[name])}\n{CONSTRAINTS.read_text()}"
    )
    environment = place / name.lower()
    label = environment / "made-of.txt"  # written last: half an environment has none
    if label.exists() and set(label.read_text().splitlines()) <= set(
        wanted.splitlines()
    ):  # a pin that came since is of something else
        return environment
    print(f"making {environment}", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    install(environment, name)
    label.write_text(wanted)
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
        said = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or [
            f"pip ended with {finished.returncode}"
        ]
        raise Missing(f"pip could not install {REQUIREMENTS[name][0]} ({said[-1]})")


def program(name: str, package: str) -> None:
    if shutil.which(name) is None:
        raise Missing(f"there is no {name} on the PATH (on Debian: apt install {package})")
