"""Separate storage for images and containers, and a Debian base image."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import BASE, PACKAGES, can_build, run, settings_of_containers

DRIVERS = ("overlay", "vfs")  # vfs copies every layer, but works everywhere


@pytest.fixture(scope="session")
def program() -> str:
    return "buildah" if shutil.which("buildah") else "podman"


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory, program: str) -> Iterator[Path]:
    """Configure buildah and podman for builds without cgroup permissions."""
    directory = tmp_path_factory.mktemp("containers")
    (directory / "home/.config/containers").mkdir(parents=True)
    (directory / "try").mkdir()
    (directory / "containers.conf").write_text(settings_of_containers(directory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(directory / "home"))
        patch.setenv("PIP_CONFIG_FILE", str(directory / "pip.conf"))
        patch.setenv("CONTAINERS_CONF", str(directory / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(directory / "storage.conf"))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        for driver in DRIVERS:
            storage = (
                f'[storage]\ndriver = "{driver}"\ngraphroot = "{directory / driver}"\n'
                f'runroot = "{directory / "run"}"\n'
            )
            (directory / "storage.conf").write_text(storage)
            if can_build(program, directory / "try"):
                break
        try:
            yield directory
        finally:
            for name, arguments in (
                ("podman", ("pod", "rm", "--all", "--force")),
                ("podman", ("rm", "--all", "--force")),
                ("buildah", ("rm", "--all")),
            ):
                if shutil.which(name):
                    run(name, *arguments)  # unmounts file systems
            for driver in DRIVERS:
                subprocess.run(["umount", directory / driver], capture_output=True, check=False)
                shutil.rmtree(directory / driver, ignore_errors=True)


@pytest.fixture(scope="session")
def base(containers: Path, program: str) -> str:
    """Build a Debian image with Python, which takes a minute."""
    context = containers / "base"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", context / "root")
    (context / "Dockerfile").write_text("FROM scratch\nADD root /\n")
    run(program, "build", "--format", "docker", "--tag", BASE, context)
    shutil.rmtree(context)
    return BASE
