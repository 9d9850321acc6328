"""Programs for real containers, with storage and settings of their own."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BASE = "localhost/tsx-base:1"
# podman performs the probes of a pod with curl
PACKAGES = "python3-minimal,python3-venv,python3-pip,ca-certificates,curl"
LONG_S = 1800.0
PROCESSES = 32_768  # podman lowers its own limit, so a container cannot have the machine's


def run(
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    code: int = 0,
    cwd: Path | None = None,
) -> str:
    """Run a program that must end with `code`; return its output, after a failure with stderr."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=environment,
        cwd=cwd,
        check=False,
    )
    shown = f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == code, f"{done.returncode}: {shown}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def pip_settings() -> tuple[str, list[Path]]:
    """Return pip's settings on this machine as one file, and the directories that they name."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    settings = re.findall(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    text = "[global]\n" + "".join(
        f"{key} = {value}\n" for key, value in dict(settings).items() if key != "config-file"
    )
    # An index has its files beside it.
    named = {
        Path(path).parent for _, value in settings for path in re.findall(r"file://(/\S+)", value)
    }
    named |= {Path(path) for _, value in settings for path in re.findall(r"(?<!\S)/\S+", value)}
    certificates = Path("/etc/ssl/certs")
    return text, [
        certificates,
        *sorted(path for path in named if path.exists() and not path.is_relative_to(certificates)),
    ]


def settings_of_containers(directory: Path) -> str:
    """Return a containers.conf with pip's settings for builds and the limits of this machine."""
    text, named = pip_settings()
    (directory / "pip.conf").write_text(text)
    mounts = [f"{path}:{path}:ro" for path in named] + [
        f"{directory / 'pip.conf'}:/etc/pip.conf:ro"
    ]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = PROCESSES if processes == resource.RLIM_INFINITY else min(processes, PROCESSES)
    limits = [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]
    return f"[containers]\nvolumes = {json.dumps(mounts)}\ndefault_ulimits = {json.dumps(limits)}\n"


def can_build(program: str, directory: Path) -> bool:
    """Tell whether the program can build an image with the storage that it is set up with."""
    (directory / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    return (
        subprocess.run([program, "build", directory], capture_output=True, check=False).returncode
        == 0
    )
