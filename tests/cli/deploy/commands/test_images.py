"""Images of tsx deploy to AWS: built where none is given, pushed to ECR by its own password,
deployed by the digest that it gives.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import HANDLER, Deploy
from tests.support.models import make_model
from tests.support.platforms.aws import ACCOUNT, REGION, Course
from tests.support.platforms.aws_lambda import make_role
from tests.support.platforms.docker import Engine
from tests.support.wheels import make_wheel
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.main import main

pytestmark = pytest.mark.slow

HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"


@pytest.fixture
def docker(course: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """With moto's ECR behind it: what is pushed is there then."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    push = Builder.push

    def and_put(builder: Builder, reference: str) -> None:
        push(builder, reference)
        _, _, rest = reference.partition("/")
        repository, _, tag = rest.rpartition(":")
        manifest = json.dumps({"schemaVersion": 2, "config": {"digest": f"sha256:{tag}"}})
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        boto3.client("ecr").put_image(
            repositoryName=repository,
            imageManifest=manifest,
            imageManifestMediaType=kind,
            imageTag=tag,
        )

    monkeypatch.setattr(Builder, "push", and_put)
    return Engine(tmp_path / "bin").here(monkeypatch)


def planned(deploy: Deploy, *words: str, code: int) -> dict[str, Any]:
    return {change["id"]: change for change in deploy.plan(*words, code=code)["changes"]}


@pytest.fixture
def on(tmp_path: Path, docker: Engine, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command for a target, without an image."""
    archive = make_model(tmp_path / "digits.mar", HANDLER)
    wheel = make_wheel(tmp_path / "wheels", "tsx_serve", "0.1.0")

    def deploy(target: str) -> Deploy:
        made = Deploy(archive, target, capsys, [f"--set=build.wheel={wheel}"])
        made.image = ()
        return made

    return deploy


@pytest.fixture
def deploy(on: Any) -> Any:
    return on("sagemaker")


def test_an_image_is_built_pushed_and_deployed_by_its_digest(
    deploy: Deploy, docker: Engine
) -> None:
    changes = planned(deploy, code=2)
    assert (
        list(changes).index("Repository")
        < list(changes).index("Image")
        < list(changes).index("Model")
    )
    assert changes["Image"]["name"].startswith(f"{HOST}/tsx/sagemaker/digits:tsx-")
    deploy.apply()
    assert [context["target"] for context in docker.state["contexts"]] == ["sagemaker"]
    assert docker.state["logins"][HOST][0] == "AWS"
    model = boto3.client("sagemaker").list_models()["Models"][0]["ModelName"]
    image = boto3.client("sagemaker").describe_model(ModelName=model)["PrimaryContainer"]["Image"]
    found = boto3.client("ecr").describe_images(repositoryName="tsx/sagemaker/digits")[
        "imageDetails"
    ]
    assert image == f"{HOST}/tsx/sagemaker/digits@{found[0]['imageDigest']}"
    again = planned(deploy, code=0)
    assert {change["action"] for change in again.values()} == {"same"}


def test_a_function_gets_its_model_in_its_image(on: Any, docker: Engine) -> None:
    make_role()
    other = "x86_64" if platform.machine() in ("arm64", "aarch64") else "arm64"
    deploy, word = on("lambda"), f"--set=lambda.architecture={other}"
    deploy.apply(word)
    (built,) = docker.state["contexts"]
    assert (built["target"], "model.mar" in built["files"]) == ("lambda", True)
    assert docker.calls("build")[0][-3:-1] == [
        "--platform",
        f"linux/{'arm64' if other == 'arm64' else 'amd64'}",
    ]
    code = boto3.client("lambda").get_function(FunctionName="digits")["Code"]
    assert code["ImageUri"].startswith(f"{HOST}/tsx/lambda/digits@sha256:")
    deploy.apply(word)
    assert len(docker.calls("build")) == 1


def test_an_image_of_other_things_is_another_and_the_model_with_it(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    changes = planned(deploy, "--set=build.torch=2.8.0", code=2)
    assert {id: changes[id]["action"] for id in ("Repository", "Image", "Model")} == {
        "Repository": "same", "Image": "create", "Model": "create"
    }  # fmt: skip


def test_a_push_that_fails_says_why_and_is_picked_up(
    deploy: Deploy, docker: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Builder, "login", lambda *given: docker.set(logins={"other": ["a", "b"]}))
        deploy.apply(code=1)
    assert "no basic auth credentials" in deploy.err
    assert "Repository tsx/sagemaker/digits" in deploy.err
    deploy.apply()
    assert len(docker.calls("build")) == 1  # what was built is there


def test_purge_takes_the_repository_along(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes", "--purge")
    assert boto3.client("ecr").describe_repositories()["repositories"] == []


def test_purge_removes_the_images_of_all_versions_from_a_repository_that_others_use_too(
    deploy: Deploy, docker: Engine
) -> None:
    client, shared = boto3.client("ecr"), f"{HOST}/models"
    client.create_repository(repositoryName="models")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": kind, "config": {"digest": "sha256:other"}}
    )
    client.put_image(
        repositoryName="models", imageManifest=manifest, imageTag="tsx-digits-2-0123456789ab"
    )
    words = (f"--set=repository={shared}", "--set=keep=1")
    deploy.apply(*words)
    deploy.apply(*words, "--set=build.torch=2.8.0")
    assert len(boto3.client("sagemaker").list_models()["Models"]) == 1
    assert len(client.list_images(repositoryName="models")["imageIds"]) == 3
    deploy.verb("destroy", "--yes", *words)
    deploy.verb("destroy", "--yes", "--purge", *words)
    assert [
        each["imageTag"] for each in client.list_images(repositoryName="models")["imageIds"]
    ] == ["tsx-digits-2-0123456789ab"]


def test_a_repository_that_is_none_of_ecr_is_reported(deploy: Deploy, docker: Engine) -> None:
    deploy.apply("--set=repository=docker.io/me/digits", code=2)
    assert "takes images from ECR only" in deploy.err


def test_without_a_program_that_builds_the_ways_out_are_reported(
    deploy: Deploy, docker: Engine, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "docker").unlink()
    deploy.apply(code=1)
    assert (
        "docker is not installed; podman is" in deploy.err
    )
    assert "--emit dockerfile DIR" in deploy.err


@pytest.mark.parametrize(("verb", "code"), [("--yes", 2), ("--plan", 1)])
@pytest.mark.parametrize(
    ("target", "setting", "said"),
    [
        ("sagemaker", "sagemaker.instances=1", "sagemaker.role is not given"),
        ("sagemaker", "sagemaker.component.endpoint=shared", "sagemaker.role is not given"),
        ("lambda", "lambda.memory=512", "lambda.role is not given"),
        ("container", "container.host=0.0.0.0", "which other machines can reach: set "),
    ],
)
@pytest.mark.usefixtures("docker")
def test_what_is_missing_is_told_before_a_wheel_is_looked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    code: int,
    target: str,
    setting: str,
    said: str,
) -> None:
    archive = make_model(tmp_path / "digits.mar", HANDLER)
    words = [
        "deploy",
        str(archive),
        "--target",
        target,
        "--set",
        setting,
        "--set=build.wheel=absent.whl",
        verb,
    ]
    assert main(words) == code
    assert said in capsys.readouterr().err
