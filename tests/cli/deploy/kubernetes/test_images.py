"""Images of a deployment on Kubernetes: by their digests, whoever tells them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import IMAGE, Deploy
from tests.support.platforms.docker import Engine, digest
from tests.support.platforms.kubectl import Cluster
from tests.support.wheels import make_wheel
from tsx_cli.deploy.image import programs
from tsx_cli.deploy.image.programs import Builder, Program

DIGEST = "sha256:" + "ab" * 32
REPOSITORY = "registry.example.com:5000/digits"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """With docker beside it."""
    engine = Engine(tmp_path).here(monkeypatch)
    docker = Program.try_
    cluster = Cluster(monkeypatch)
    kubectl = Program.try_

    def either(program: Program, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return (docker if program.name == "docker" else kubectl)(program, *words, **more)

    monkeypatch.setattr(Program, "try_", either)
    cluster.engine = engine  # type: ignore[attr-defined]  # for the tests of this file
    return cluster


def image_of(cluster: Cluster) -> str:
    return str(
        cluster.objects["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][0][
            "image"
        ]
    )


@pytest.mark.parametrize("has_buildx", [True, False])
def test_an_image_that_is_built_is_deployed_by_the_digest_of_its_push(
    deploy: Deploy, cluster: Cluster, tmp_path: Path, has_buildx: bool
) -> None:
    engine: Engine = cluster.engine  # type: ignore[attr-defined]
    engine.set(broken_buildx=not has_buildx)
    wheel = make_wheel(tmp_path / "wheels", "tsx_serve", "0.1.0")
    words = [
        "digits.mar",
        "--no-check",
        f"--set=build.wheel={wheel}",
        f"--set=repository={REPOSITORY}",
    ]
    deploy("apply", *words, "--yes")
    (pushed,) = engine.state["pushed"]
    assert pushed.startswith(f"{REPOSITORY}:tsx-")
    assert image_of(cluster) == f"{REPOSITORY}@{digest(pushed)}"
    again = json.loads(deploy("plan", *words, "--json", code=0))
    assert {change["action"] for change in again["changes"]} == {"same"}


def test_a_tag_is_deployed_by_the_digest_that_its_registry_tells(
    deploy: Deploy, cluster: Cluster
) -> None:
    cluster.engine.set(pushed=[IMAGE])  # type: ignore[attr-defined]
    shown = deploy.apply()
    assert image_of(cluster) == f"registry.example.com/digits@{digest(IMAGE)}"
    assert "by its tag" not in shown


def test_a_tag_that_nothing_can_tell_the_digest_of_is_kept_and_the_plan_says_so(
    deploy: Deploy, cluster: Cluster
) -> None:
    shown = deploy.apply()
    assert image_of(cluster) == IMAGE
    assert (
        f"note: {IMAGE} is deployed by its tag, which may mean another image tomorrow; crane, skopeo or docker"
        in shown
    )


def test_each_program_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def try_(program: Program, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        asked.append([program.name, *words])
        if program.name == "crane":
            raise programs.ProgramError(f"crane had not ended after {more['timeout']:g} s", "")
        return subprocess.CompletedProcess(
            [], 0 if program.name == "skopeo" else 1, f"{DIGEST}\n", ""
        )

    monkeypatch.setattr(Program, "try_", try_)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert programs.pinned(f"{REPOSITORY}:1") == f"{REPOSITORY}@{DIGEST}"
    assert asked == [
        ["crane", "digest", f"{REPOSITORY}:1"],
        [
            "skopeo",
            "--override-os",
            "linux",
            "inspect",
            "--no-tags",
            "--format",
            "{{.Digest}}",
            f"docker://{REPOSITORY}:1",
        ],
    ]
    assert programs.pinned(f"nginx@{DIGEST}") == f"nginx@{DIGEST}"


def test_podman_and_buildah_write_the_digest_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_(program: Program, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        if words[0] == "push":
            Path(words[words.index("--digestfile") + 1]).write_text(DIGEST)
        return subprocess.CompletedProcess([], 0, "Copying blob sha256:" + "0" * 64, "")

    monkeypatch.setattr(Program, "try_", try_)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert Builder("podman").push(f"{REPOSITORY}:1") == f"{REPOSITORY}@{DIGEST}"
