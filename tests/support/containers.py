"""Programs for real containers, with separate storage and settings."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BASE = "localhost/tsx-base:1"
# podman uses curl for the probes of a pod
PACKAGES = "python3-minimal,python3-venv,python3-pip,ca-certificates,curl"
LONG_S = 1800.0
PROCESSES = 32_768  # below the machine's limit, since podman lowers its own


def run(
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    code: int = 0,
    cwd: Path | None = None,
) -> str:
    """Run a program that must exit with `code`, and return its output."""
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=environment,
        cwd=cwd,
        check=False,
    )
    report = f"{' '.join(map(str, command))}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == code, f"{result.returncode}: {report}"
    return result.stdout if code == 0 else result.stdout + result.stderr


def pip_settings() -> tuple[str, list[Path]]:
    """Return pip's settings on this machine as one file, and the directories that they use."""
    settings_text = run(sys.executable, "-m", "pip", "config", "list")
    settings = re.findall(
        r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", settings_text, re.MULTILINE
    )
    text = "[global]\n" + "".join(
        f"{key} = {value}\n" for key, value in dict(settings).items() if key != "config-file"
    )
    # The files of an index are in the same directory.
    paths = {
        Path(path).parent for _, value in settings for path in re.findall(r"file://(/\S+)", value)
    }
    paths |= {Path(path) for _, value in settings for path in re.findall(r"(?<!\S)/\S+", value)}
    certificates = Path("/etc/ssl/certs")
    return text, [
        certificates,
        *sorted(path for path in paths if path.exists() and not path.is_relative_to(certificates)),
    ]


def settings_of_containers(directory: Path) -> str:
    """Return a containers.conf with pip's settings for builds and this machine's limits."""
    text, paths = pip_settings()
    (directory / "pip.conf").write_text(text)
    mounts = [f"{path}:{path}:ro" for path in paths] + [
        f"{directory / 'pip.conf'}:/etc/pip.conf:ro"
    ]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = PROCESSES if processes == resource.RLIM_INFINITY else min(processes, PROCESSES)
    limits = [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]
    return f"[containers]\nvolumes = {json.dumps(mounts)}\ndefault_ulimits = {json.dumps(limits)}\n"


def can_build(program: str, directory: Path) -> bool:
    """Tell whether the program can build an image with its storage."""
    (directory / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    return (
        subprocess.run([program, "build", directory], capture_output=True, check=False).returncode
        == 0
    )
