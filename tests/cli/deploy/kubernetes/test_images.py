"""Images of a deployment on Kubernetes, pinned to digests that one of several programs reports."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import IMAGE, Deploy, container_of
from tests.support.platforms.docker import Engine, digest
from tests.support.platforms.kubectl import Cluster
from tests.support.wheels import make_wheel
from tsx_cli.deploy.image import programs
from tsx_cli.deploy.image.programs import Builder, Program

DIGEST = "sha256:" + "ab" * 32
REPOSITORY = "registry.example.com:5000/digits"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Build a double of kubectl with one of docker beside it."""
    engine = Engine(tmp_path).here(monkeypatch)
    docker = Program.run_unchecked
    cluster = Cluster(monkeypatch)
    kubectl = Program.run_unchecked

    def run_double(
        program: Program, *arguments: str, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        return (docker if program.name == "docker" else kubectl)(program, *arguments, **more)

    monkeypatch.setattr(Program, "run_unchecked", run_double)
    cluster.engine = engine  # type: ignore[attr-defined]  # for the tests of this file
    return cluster


@pytest.mark.parametrize("has_buildx", [True, False])
def test_a_built_image_is_deployed_by_its_pushed_digest(
    deploy: Deploy, cluster: Cluster, tmp_path: Path, has_buildx: bool
) -> None:
    engine: Engine = cluster.engine  # type: ignore[attr-defined]
    engine.set(broken_buildx=not has_buildx)
    wheel = make_wheel(tmp_path / "wheels", "tsx_serve", "0.1.0")
    arguments = f"digits.mar --no-check --set=build.wheel={wheel} --set=repository={REPOSITORY}"
    deploy("apply", arguments, "--yes")
    (image,) = engine.state["pushed"]
    assert image.startswith(f"{REPOSITORY}:tsx-")
    assert container_of(cluster)["image"] == f"{REPOSITORY}@{digest(image)}"
    deploy("plan", arguments, code=0)


def test_a_tag_is_deployed_by_its_digest_in_the_registry(deploy: Deploy, cluster: Cluster) -> None:
    cluster.engine.set(pushed=[IMAGE])  # type: ignore[attr-defined]
    output = deploy.apply()
    assert container_of(cluster)["image"] == f"registry.example.com/digits@{digest(IMAGE)}"
    assert "by its tag" not in output


def test_a_tag_with_an_unknown_digest_gets_a_note(deploy: Deploy, cluster: Cluster) -> None:
    output = deploy.apply()
    assert container_of(cluster)["image"] == IMAGE
    assert f"{IMAGE} is deployed by its tag" in output


def test_each_program_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run_unchecked(
        program: Program, *arguments: str, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        calls.append(" ".join([program.name, *arguments]))
        if program.name == "crane":
            raise programs.ProgramError(f"crane had not ended after {more['timeout']:g} s", "")
        status = 0 if program.name == "skopeo" else 1
        return subprocess.CompletedProcess([], status, f"{DIGEST}\n", "")

    monkeypatch.setattr(Program, "run_unchecked", run_unchecked)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert programs.pin_digest(f"{REPOSITORY}:1") == f"{REPOSITORY}@{DIGEST}"
    skopeo = "skopeo --override-os linux inspect --no-tags --format {{.Digest}} docker://"
    assert calls == [f"crane digest {REPOSITORY}:1", f"{skopeo}{REPOSITORY}:1"]
    assert programs.pin_digest(f"nginx@{DIGEST}") == f"nginx@{DIGEST}"


def test_podman_and_buildah_write_the_digest_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_unchecked(
        program: Program, *arguments: str, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        if arguments[0] == "push":
            Path(arguments[arguments.index("--digestfile") + 1]).write_text(DIGEST)
        return subprocess.CompletedProcess([], 0, "Copying blob sha256:" + "0" * 64, "")

    monkeypatch.setattr(Program, "run_unchecked", run_unchecked)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert Builder("podman").push(f"{REPOSITORY}:1") == f"{REPOSITORY}@{DIGEST}"
